"""A plan in words."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tutti.cluster import format_time
from tutti.plan.prediction import Prediction
from tutti.strategies import AllReduce, Strategy

if TYPE_CHECKING:
    from tutti.plan.choose import Plan


def in_words(plan: "Plan") -> str:
    """What to do, and why: one sentence for each question that a plan answers."""
    return " ".join([_use(plan), *_exactness(plan), *_codecs(plan)])


def has_codec(strategy: Strategy) -> bool:
    return getattr(strategy, "codec", None) is not None


def sums_with_and_without(found: Sequence[Prediction]) -> tuple[Prediction | None, Prediction | None]:
    """The fastest all-reduce with a codec, and the fastest without, if there are any."""
    sums = [each for each in found if isinstance(each.strategy, AllReduce)]
    compressed, plain = ([each for each in sums if has_codec(each.strategy) is wanted] for wanted in (True, False))
    return _fastest(compressed) if compressed else None, _fastest(plain) if plain else None


def _use(plan: "Plan") -> str:
    best, alone = plan.best, plan.alone
    if plan.workers == 1:
        return "One worker has nobody to talk to."
    times = best.samples_per_s / alone.samples_per_s if alone.samples_per_s else 0.0
    spent = f"of {format_time(best.step_s)} a step, {format_time(best.exposed_s)} are communication"
    if not plan.distribute:
        return (
            f"Do not distribute: even {best.strategy} would train {times:.2g} times as many samples a "
            f"second with {plan.workers} workers as one does alone; {spent}."
        )
    return (
        f"Use {best.strategy}: {plan.workers} workers train {times:.3g} times as many samples a second as one; {spent} "
        f"and {best.efficiency:.0%} computing."
    )


def _exactness(plan: "Plan") -> list[str]:
    """What is exact beside what is not."""
    exacts = [each for each in plan.predictions if each.exact]
    others = [each for each in plan.predictions if not each.exact]
    if not exacts or not others:
        return []
    best, fastest = _fastest(exacts), _fastest(others)
    if not plan.best.exact:
        gain = best.step_s / plan.best.step_s
        return [
            f"It is not exact, and {gain:.2g} times as fast as {best.strategy}, which is; accuracy is not predicted."
        ]
    share = fastest.step_s / best.step_s
    return [f"It is exact; {fastest.strategy}, the fastest that is not, would take {share:.0%} of its time."]


def _codecs(plan: "Plan") -> list[str]:
    if plan.compress is not False:
        return []
    compressed, plain = sums_with_and_without(plan.predictions)
    if compressed is None or plain is None:
        return []
    share = f"takes {compressed.step_s / plain.step_s:.0%} of the time of {plain.strategy}"
    return [f"Do not compress: the fastest codec, {compressed.strategy}, {share}."]


def _fastest(found: list[Prediction]) -> Prediction:
    return min(found, key=lambda each: each.step_s)
