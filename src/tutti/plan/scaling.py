"""How many workers pay: each number of them with the best strategy for it, by formula."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from tutti.cluster import Cluster
from tutti.cost import Profile
from tutti.cost.placement import restricted_to
from tutti.cost.scaled_profile import slowed, with_batch
from tutti.errors import ConfigError
from tutti.plan.candidates import candidates
from tutti.plan.prediction import Prediction, price
from tutti.strategies import Strategy

Profiles = Callable[[int], Profile]
"""Of one of so many workers."""

LEAST_EFFICIENCY, LEAST_GAIN = 0.5, 1.1
"""With less of its time left for computing, or less gained by twice as many, adding workers does not pay."""

MOST_WORKERS = 1024
"""More are not asked after."""


def share_of(global_batch: int, workers: int) -> int:
    """Samples of each worker; of the one that has most, if they cannot be divided evenly."""
    if global_batch < workers:
        raise ConfigError(
            f"a global batch of {global_batch} samples leaves some of {workers} workers without any. Use more "
            "samples or fewer workers."
        )
    return -(-global_batch // workers)


def each_has(profile: Profile | Profiles, workers: int, global_batch: int | None) -> Profile:
    """The step of one of so many workers, who divide a global batch if there is one."""
    own = profile if isinstance(profile, Profile) else profile(workers)
    return own if global_batch is None else with_batch(own, share_of(global_batch, workers))


def sharing_cores(single: Profile, whole: Profile, num_cores: int) -> Profiles:
    """Profiles of workers on one machine: `single` was measured with one thread, `whole` with as many as cores.

    Each has an equal part of the cores as threads; where there are fewer cores than workers, these take turns. One that
    is alone has whichever was quicker.
    """
    gained = min(1.0, (whole.forward_s + whole.backward_s) / (single.forward_s + single.backward_s))

    def profile(workers: int) -> Profile:
        if workers == 1:
            return whole if gained < 1 else single
        threads = num_cores // workers
        return slowed(single, max(gained, 1 / threads) if threads else workers / num_cores)

    return profile


def priced(
    strategies: Iterable[Strategy], profile: Profile, workers: int, cluster: Cluster, total_samples: int | None = None
) -> list[Prediction]:
    """Predict a step of each strategy by its formula.

    Strategies that so many ranks cannot use, or whose servers find no slot on the cluster, are left out.
    """
    found = []
    for strategy in strategies:
        with suppress(ConfigError):
            strategy.check_size(workers + strategy.num_dedicated_servers)
            found.append(price(strategy, profile, workers, cluster))
    return found if total_samples is None else [replace(each, total_samples=total_samples) for each in found]


def pays_up_to(
    profile: Profile | Profiles, cluster: Cluster, allow_lossy: bool, global_batch: int | None, alone: Prediction
) -> tuple[int | None, int]:
    """The number of workers, doubled from one, after which twice as many do not pay; and up to how many was asked.

    They do not pay if less than half of their time is left for computing, or if hardly more samples a second are
    trained. The first is None where they pay as far as was asked.
    """
    before, rate = 1, alone.samples_per_s
    for workers in _doubled(cluster, global_batch):
        own = each_has(profile, workers, global_batch)
        few = restricted_to(cluster, workers)
        offered = candidates(own, workers, few)
        found = priced([*offered.exact, *(offered.lossy if allow_lossy else [])], own, workers, few, global_batch)
        best = min(found, key=lambda each: each.step_s, default=None)
        if best is None:  # They are not joined.
            return before, workers
        if best.efficiency < LEAST_EFFICIENCY or best.samples_per_s < LEAST_GAIN * rate:
            return before, workers
        before, rate = workers, best.samples_per_s
    return None, before


def _doubled(cluster: Cluster, global_batch: int | None) -> Iterator[int]:
    """2, 4, 8, ... while the cluster has places and the batch has samples for all."""
    workers = 2
    while workers <= min(MOST_WORKERS, global_batch or MOST_WORKERS):
        try:
            restricted_to(cluster, workers).place(workers)
        except ConfigError:
            return
        yield workers
        workers *= 2
