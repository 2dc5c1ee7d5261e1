"""Choose how to train: every strategy priced, the best one, and why; or none of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tutti.cluster import Cluster
from tutti.errors import ConfigError, NoLink
from tutti.plan.candidates import exact, lossy
from tutti.plan.cost import Prediction, Simulated, price
from tutti.plan.place import up_to
from tutti.plan.profile import Profile
from tutti.plan.reason import has_codec, in_words, sums_with_and_without
from tutti.plan.scaling import each_has, pays_up_to, priced
from tutti.strategies import AllReduce, ParameterServer, Strategy
from tutti.strategies.averaging.strategy import Blocks

GAIN = 1.1
"""What is lossy must be faster than what is exact by this to be chosen, and a codec than none."""

NEAR = 1.15
"""What takes no longer than this times the fastest is about as fast: of those, the one nearest to exact is chosen."""

_MOST_SIMULATED = 6
"""Of the exact, and of the lossy: the best by formula are simulated, until the best is one that was."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to train, and why."""

    workers: int
    alone: Prediction
    """Of one worker."""
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

    @property
    def best(self) -> Prediction:
        return self.predictions[0]

    def as_dict(self) -> dict[str, Any]:
        own = {key: value for key, value in vars(self).items() if key not in ("alone", "predictions")}
        return {**own, "alone": self.alone.as_dict(), "predictions": [each.as_dict() for each in self.predictions]}


def plan(
    profile: Profile,
    workers: int,
    cluster: Cluster,
    *,
    allow_lossy: bool = False,
    global_batch: int | None = None,
    simulated: Simulated | None = None,
) -> Plan:
    """Price what can be used by so many workers on a cluster, and choose.

    Args:
        profile: of one worker of speed 1.
        allow_lossy: also consider what does not do exactly what one worker would: codecs, stale and rare exchanges.
        global_batch: samples of all workers together, however many they are; by default each has the profile's.
        simulated: asked where formulas do not hold, about the few that are best by formula.
    """
    if workers < 1:
        raise ConfigError(f"workers must be 1 or more, got {workers}.")
    cluster.place(workers)
    own = each_has(profile, workers, global_batch)
    asked = [list(exact(own)), list(lossy()) if allow_lossy else []]
    exacts, lossies = (_looked_at(priced(group, own, workers, cluster), own, cluster, simulated) for group in asked)
    chosen = choose(exacts, lossies)
    rest = sorted((each for each in (*exacts, *lossies) if each is not chosen), key=_step_s)
    alone = price(AllReduce(), each_has(profile, 1, global_batch), 1, up_to(cluster, 1))
    last, most = pays_up_to(profile, cluster, allow_lossy, global_batch)
    made = Plan(
        workers=workers,
        alone=alone,
        predictions=(chosen, *rest),
        distribute=chosen.samples_per_s > alone.samples_per_s,
        compress=_compress([chosen, *rest]) if allow_lossy else None,
        stops_paying_at=last,
        most_workers=most,
        reason="",
    )
    return replace(made, reason=in_words(made))


def choose(exacts: Sequence[Prediction], lossies: Sequence[Prediction]) -> Prediction:
    """The fastest exact one, unless lossy ones are clearly faster: of the fastest of those, the nearest to exact."""
    best = min(exacts, key=_step_s)
    better = [each for each in lossies if each.step_s * GAIN <= best.step_s]
    fastest_s = min((each.step_s for each in better), default=0.0)
    near = [each for each in better if each.step_s <= NEAR * fastest_s]
    return min(near, key=lambda each: (_distance(each.strategy), -each.bytes_per_step)) if near else best


def _distance(strategy: Strategy) -> int:
    """From exact: sums of all gradients come first, then servers, then models brought together now and then."""
    kinds = (AllReduce, ParameterServer, Blocks)
    return next((number for number, kind in enumerate(kinds) if isinstance(strategy, kind)), len(kinds))


def _step_s(prediction: Prediction) -> float:
    return prediction.step_s


def _looked_at(
    found: list[Prediction], profile: Profile, cluster: Cluster, simulated: Simulated | None
) -> list[Prediction]:
    """The same, with the best of them simulated where formulas do not hold."""
    for _ in range(_MOST_SIMULATED if simulated is not None else 0):
        found.sort(key=_step_s)
        if not found or found[0].simulated:
            break
        first = found.pop(0)
        try:
            again = price(first.strategy, profile, first.workers, cluster, simulated)
        except NoLink:  # It would talk between hosts that are not joined.
            continue
        found.append(again)
        if not again.simulated:  # A formula holds for it, and so for all.
            break
    return found


def _compress(found: Sequence[Prediction]) -> bool:
    """Whether a codec makes all-reduce clearly faster, or is part of the first of these."""
    coded, plain = sums_with_and_without(found)
    return has_codec(found[0].strategy) or coded.step_s * GAIN <= plain.step_s
