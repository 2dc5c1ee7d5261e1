"""Choose how to train: every strategy priced, the best one, and why; or none of them."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from tutti.cluster import Cluster
from tutti.cost import Profile
from tutti.cost.placement import least_slowness, restricted_to
from tutti.cost.scaled_profile import slowed
from tutti.errors import ConfigError, NoLink
from tutti.plan.candidates import candidates
from tutti.plan.prediction import Prediction, Simulator, price
from tutti.plan.reason import has_codec, in_words, sums_with_and_without
from tutti.plan.scaling import Profiles, each_has, pays_up_to, priced
from tutti.strategies import AllReduce

GAIN = 1.1
"""What is lossy must be faster than what is exact by this to be chosen, and a codec than none."""

TIE = 1.02
"""Exact ones that differ by less are taken for equal: all-reduce comes before servers, and "native" first of all."""

NEAR = 1.05
"""What takes no longer than this times the fastest is about as fast: of those, the one nearest to exact is chosen."""

_MOST_SIMULATED = 6
"""Of the exact, and of the lossy: the best by formula are simulated, until the best is one that was."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to train, and why."""

    workers: int
    alone: Prediction
    """Of one worker, the quickest there is."""
    predictions: tuple[Prediction, ...]
    """The one to use, and the others by samples a second."""
    distribute: bool
    """Whether the best is faster than one worker alone."""
    compress: bool | None
    """Whether a codec is worth what it costs: to the strategy chosen, or to all-reduce; None if none was asked for."""
    stops_paying_at: int | None
    """Workers, doubled from one, beyond which adding more does not pay; None if it pays up to `most_workers`."""
    most_workers: int
    reason: str
    not_priced: dict[str, str] = field(default_factory=dict)
    """Strategies that could not be compared, and why."""

    @property
    def best(self) -> Prediction:
        return self.predictions[0]

    def as_dict(self) -> dict[str, Any]:
        own = {key: value for key, value in vars(self).items() if key not in ("alone", "predictions")}
        return {**own, "alone": self.alone.as_dict(), "predictions": [each.as_dict() for each in self.predictions]}


def plan(
    profile: Profile | Profiles,
    workers: int,
    cluster: Cluster,
    *,
    allow_lossy: bool = False,
    global_batch: int | None = None,
    simulator: Simulator | None = None,
) -> Plan:
    """Price what can be used by so many workers on a cluster, and choose.

    Args:
        profile: of one worker of speed 1; or a function that gives it for so many workers, where they hold each other
            up, as those that share cores do.
        allow_lossy: also consider what does not do exactly what one worker would: codecs, stale and rare exchanges.
        global_batch: samples of all workers together, however many they are; by default each has the profile's.
        simulator: asked where formulas do not hold, about the few that are best by formula.
    """
    if workers < 1:
        raise ConfigError(f"workers must be 1 or more, got {workers}.")
    cluster = restricted_to(cluster, workers)
    cluster.place(workers)
    own = each_has(profile, workers, global_batch)
    offered = candidates(own, workers, cluster)
    found = (
        priced(group, own, workers, cluster, global_batch)
        for group in (offered.exact, offered.lossy if allow_lossy else [])
    )
    exacts, lossies = (_looked_at(group, own, cluster, simulator) for group in found)
    if not exacts and not lossies:
        raise NoLink(f"hosts of the cluster '{cluster.name}' are not joined as any strategy needs: give them links.")
    chosen = choose(exacts, lossies)
    rest = sorted((each for each in (*exacts, *lossies) if each is not chosen), key=_step_s)
    alone = price(
        AllReduce(), slowed(each_has(profile, 1, global_batch), least_slowness(cluster, workers)), 1, Cluster()
    )
    last, most = pays_up_to(profile, cluster, allow_lossy, global_batch, alone)
    made = Plan(
        workers=workers,
        alone=alone,
        predictions=(chosen, *rest),
        distribute=chosen.samples_per_s > alone.samples_per_s,
        compress=_compress([chosen, *rest]) if allow_lossy else None,
        stops_paying_at=last,
        most_workers=most,
        not_priced=offered.not_priced,
        reason="",
    )
    return replace(made, reason=in_words(made))


def choose(exacts: Sequence[Prediction], lossies: Sequence[Prediction]) -> Prediction:
    """An exact one, unless lossy ones are clearly faster: of the fastest of those, the nearest to exact."""
    quickest_s = min((each.step_s for each in exacts), default=inf)
    best = min((each for each in exacts if each.step_s <= TIE * quickest_s), key=_preference, default=None)
    better = [each for each in lossies if best is None or each.step_s * GAIN <= best.step_s]
    if best is not None and not better:
        return best
    fastest_s = min(each.step_s for each in better)
    near = [each for each in better if each.step_s <= NEAR * fastest_s]
    return min(near, key=lambda each: (each.strategy.preference, -each.bytes_per_step))


def _preference(prediction: Prediction) -> int:
    return prediction.strategy.preference


def _step_s(prediction: Prediction) -> float:
    return prediction.step_s


def _looked_at(
    found: list[Prediction], profile: Profile, cluster: Cluster, simulator: Simulator | None
) -> list[Prediction]:
    """The same, with the best of them simulated where formulas do not hold."""
    asked = 0
    while simulator is not None and found and asked < _MOST_SIMULATED:
        first = min(found, key=_step_s)
        if first.simulated:
            break
        place = found.index(first)
        del found[place]
        with suppress(NoLink):  # It would talk between hosts that are not joined: there it cannot be used.
            again = price(first.strategy, profile, first.workers, cluster, simulator)
            found.insert(place, replace(again, total_samples=first.total_samples))
            asked += 1
            if not found[place].simulated:  # A formula holds for it, and so for all.
                break
    return found


def _compress(found: Sequence[Prediction]) -> bool:
    """Whether a codec makes all-reduce clearly faster, or is part of the first of these."""
    compressed, plain = sums_with_and_without(found)
    gains = compressed is not None and (plain is None or compressed.step_s * GAIN <= plain.step_s)
    return has_codec(found[0].strategy) or gains
