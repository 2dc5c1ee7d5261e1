"""Throughput by number of workers: each with the fastest strategy for it, by formula, and where more stop paying."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from tutti.cluster import Cluster
from tutti.cost import Profile
from tutti.cost.placement import restricted_to
from tutti.cost.scaled_profile import slowed, with_batch
from tutti.errors import ConfigError
from tutti.plan.candidates import candidates
from tutti.plan.goodput import FailureRates
from tutti.plan.prediction import Prediction, price
from tutti.strategies import Strategy

Profiles = Callable[[int], Profile]
"""Returns the profile of one worker, given the number of workers."""

LEAST_EFFICIENCY, LEAST_GAIN = 0.5, 1.1
"""Doubling the workers pays if at least this share of a step is computation, and if it trains at least this many times
as many samples per second."""

MOST_WORKERS = 1024
"""The largest number of workers that is predicted."""


@dataclass(frozen=True, kw_only=True)
class RunSize:
    """How many samples a run trains, and what happens to its workers, as far as that is known."""

    global_batch: int | None = None
    """Samples per step of all workers together; None if each worker has the batch of its profile."""
    num_samples: int | None = None
    """Samples of the whole run: epochs times samples of an epoch. None if not known."""
    failures: FailureRates | None = None
    """How often workers fail; None if they do not."""

    def num_steps(self, worker: Profile, workers: int) -> int | None:
        """Return the steps of the whole run; None if its length is not known."""
        per_step = self.global_batch or workers * worker.num_samples
        return None if self.num_samples is None else self.num_samples // per_step


UNKNOWN_SIZE = RunSize()
"""A run of which nothing is known."""


def share_of(global_batch: int, workers: int) -> int:
    """Return the samples of each worker; of the one that has most, if they cannot be divided evenly."""
    if global_batch < workers:
        raise ConfigError(
            f"a global batch of {global_batch} samples leaves some of {workers} workers without any. Use more "
            "samples or fewer workers."
        )
    return -(-global_batch // workers)  # Rounded up: the worker with most samples sets the length of a step.


def worker_profile(profile: Profile | Profiles, workers: int, run: RunSize) -> Profile:
    """Return the profile of one of `workers` workers, which divide the global batch if there is one."""
    worker = profile if isinstance(profile, Profile) else profile(workers)
    return worker if run.global_batch is None else with_batch(worker, share_of(run.global_batch, workers))


def sharing_cores(one_thread: Profile, all_threads: Profile, num_cores: int) -> Profiles:
    """Return the profiles of workers that share one machine.

    Each worker has an equal part of the cores as threads. If there are fewer cores than workers, they take turns. A
    single worker has whichever of the two profiles is faster.

    Args:
        one_thread: measured with one thread.
        all_threads: measured with as many threads as cores.
    """
    # Time on all cores relative to one core. At most 1: where more threads only harm, one is used.
    one_thread_s = one_thread.forward_s + one_thread.backward_s
    fraction = min(1.0, (all_threads.forward_s + all_threads.backward_s) / one_thread_s)

    def profile(workers: int) -> Profile:
        if workers == 1:
            return all_threads if fraction < 1 else one_thread
        threads = num_cores // workers
        if not threads:  # Several workers take turns on each core.
            return slowed(one_thread, workers / num_cores)
        # Linear speed-up with the number of threads, up to the speed that was measured on all cores.
        return slowed(one_thread, max(fraction, 1 / threads))

    return profile


def priced(
    strategies: Iterable[Strategy], profile: Profile, workers: int, cluster: Cluster, total_samples: int | None = None
) -> list[Prediction]:
    """Predict a step of each strategy by its formula.

    Strategies that so many ranks cannot use, or whose servers find no slot on the cluster, are left out.
    """
    predictions = []
    for strategy in strategies:
        with suppress(ConfigError):
            strategy.check_size(workers + strategy.num_dedicated_servers)
            predictions.append(price(strategy, profile, workers, cluster))
    if total_samples is None:
        return predictions
    # A profile's batch times the number of workers may be more than the global batch, whose shares are rounded up.
    return [replace(prediction, total_samples=total_samples) for prediction in predictions]


class ScalingRow(NamedTuple):
    """The predicted throughput of one number of workers, with its fastest strategy."""

    workers: int
    strategy: str
    samples_per_s: float
    """Samples per second of all workers."""
    speed_up: float
    """Samples per second, relative to one worker alone."""
    efficiency: float
    """Speed-up divided by the number of workers."""


class Scaling(NamedTuple):
    """Predicted throughput by number of workers, and the number beyond which more do not pay."""

    rows: tuple[ScalingRow, ...]
    """One worker, then 2, 4, 8, ... up to the number asked for, or to the first that does not pay if that is more."""
    stops_paying_at: int | None
    """The last number of workers that pays; None if all that were predicted do."""
    most_workers: int
    """The first number that does not pay; if all do, the largest that was predicted."""
    reason: str
    """Why the threshold is where it is, in a sentence."""


def scaling_row(prediction: Prediction, alone: Prediction) -> ScalingRow:
    """Return the row of a prediction, relative to one worker alone."""
    workers, samples_per_s = prediction.workers, prediction.samples_per_s
    speed_up = samples_per_s / alone.samples_per_s if alone.samples_per_s else 0.0
    name = "one worker" if workers == 1 else str(prediction.strategy)
    return ScalingRow(workers, name, samples_per_s, speed_up, speed_up / workers)


def predict_scaling(
    profile: Profile | Profiles,
    cluster: Cluster,
    allow_lossy: bool,
    run: RunSize,
    best: Prediction,
    alone: Prediction,
) -> Scaling:
    """Predict 2, 4, 8, ... workers, each with the fastest strategy for it, and find where doubling stops paying.

    Doubling does not pay if less than half of a step would be computation (`LEAST_EFFICIENCY`), or if it gains less
    than 10 % samples per second (`LEAST_GAIN`).

    Args:
        best: the prediction that was chosen for the number of workers asked for; it stands in the table.
        alone: the prediction of one worker.
    """
    rows, before = {1: scaling_row(alone, alone)}, alone
    stops_at, most, reason = None, 1, ""
    for workers in _doubled(cluster, run.global_batch):
        # The table goes on to the number asked for, also beyond the threshold.
        if stops_at is not None and workers > best.workers:
            break
        fastest = _fastest(profile, workers, cluster, allow_lossy, run)
        if fastest is not None:
            rows[workers] = scaling_row(fastest, alone)
        if stops_at is None:  # The first doubling that does not pay counts, even if a later one would.
            most, reason = workers, _refusal(before, fastest, workers)
            stops_at = before.workers if reason else None
        if fastest is None:
            break
        before = fastest
    # The chosen strategy may be simulated or preferred, and its number of workers need not be a power of two.
    if best.workers > 1:
        rows[best.workers] = scaling_row(best, alone)
    return Scaling(tuple(rows[workers] for workers in sorted(rows)), stops_at, most, reason or _all_pay(most))


def _fastest(
    profile: Profile | Profiles, workers: int, cluster: Cluster, allow_lossy: bool, run: RunSize
) -> Prediction | None:
    """Return the fastest strategy for a number of workers, by formula; None if no strategy can be used."""
    worker, hosts = worker_profile(profile, workers, run), restricted_to(cluster, workers)
    # More workers train more samples per step, so the same run has fewer steps for them.
    offered = candidates(worker, workers, hosts, run.num_steps(worker, workers))
    strategies = [*offered.exact, *(offered.lossy if allow_lossy else [])]
    predictions = priced(strategies, worker, workers, hosts, run.global_batch)
    return min(predictions, key=lambda prediction: prediction.step_s, default=None)


def _refusal(before: Prediction, fastest: Prediction | None, workers: int) -> str:
    """Say why doubling the workers to `workers` does not pay; nothing if it does."""
    beyond = f"More than {before.workers} {'worker does' if before.workers == 1 else 'workers do'} not pay: "
    if fastest is None:
        return f"{beyond}hosts of the cluster are not joined as any strategy needs."
    gain = fastest.samples_per_s / before.samples_per_s - 1 if before.samples_per_s else 0.0
    if fastest.samples_per_s < LEAST_GAIN * before.samples_per_s:
        change = f"gains {gain:.0%}" if gain >= 0 else f"loses {-gain:.0%}"
        return (
            f"{beyond}doubling from {before.workers} to {workers} {change} samples per second, and less than "
            f"{LEAST_GAIN - 1:.0%} does not count as worthwhile."
        )
    if fastest.efficiency < LEAST_EFFICIENCY:
        return (
            f"{beyond}with {workers} workers, {fastest.efficiency:.0%} of a step would be computation, and less than "
            f"{LEAST_EFFICIENCY:.0%} does not count as worthwhile."
        )
    return ""


def _all_pay(most: int) -> str:
    if most == 1:
        return "More than one worker was not predicted: the cluster has no room for two."
    return (
        f"Every doubling pays up to {most} workers; more were not predicted. Each gains at least {LEAST_GAIN - 1:.0%} "
        f"samples per second and leaves at least {LEAST_EFFICIENCY:.0%} of a step for computing."
    )


def _doubled(cluster: Cluster, global_batch: int | None) -> Iterator[int]:
    """Yield 2, 4, 8, ... while the cluster has slots, and the global batch has samples, for all."""
    workers = 2
    while workers <= min(MOST_WORKERS, global_batch or MOST_WORKERS):
        # The cluster itself knows how many ranks it holds: hosts may have different numbers of slots.
        try:
            restricted_to(cluster, workers).place(workers)
        except ConfigError:
            return
        yield workers
        workers *= 2
