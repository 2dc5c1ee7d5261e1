"""A plan's decisions in sentences."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tutti.cluster import format_time
from tutti.plan.candidates import LEAST_EXCHANGES, least_steps
from tutti.plan.prediction import Prediction

if TYPE_CHECKING:
    from tutti.plan.choose import Plan


def describe_plan(plan: "Plan") -> str:
    """Return what to do and why: a sentence for each question that a plan answers."""
    return " ".join([_strategy(plan), *_failures(plan), *_exactness(plan), *_run_length(plan), *_codecs(plan)])


def fastest_means(predictions: Sequence[Prediction]) -> tuple[Prediction | None, Prediction | None]:
    """Return the fastest strategy that averages gradients with a codec, and the fastest without, if there are any."""
    # Only these are compared with and without a codec: other families differ in more than their compression.
    means = [prediction for prediction in predictions if prediction.strategy.averages_gradients]
    compressed = [prediction for prediction in means if prediction.strategy.codec is not None]
    plain = [prediction for prediction in means if prediction.strategy.codec is None]
    return _fastest(compressed) if compressed else None, _fastest(plain) if plain else None


def _strategy(plan: "Plan") -> str:
    """Say which strategy to use, or to use none."""
    best, alone = plan.best, plan.alone
    if plan.workers == 1:
        return "One worker exchanges nothing."
    speed_up = best.samples_per_s / alone.samples_per_s if alone.samples_per_s else 0.0
    step = f"A step takes {format_time(best.step_s)}, of which {format_time(best.exposed_s)} is exposed communication"
    if not plan.distribute:
        return (
            f"Do not distribute: {plan.workers} workers with {best.strategy}, the best strategy, would train "
            f"{speed_up:.2g} times the samples per second of one worker. {step}."
        )
    return (
        f"Use {best.strategy}: {plan.workers} workers train {speed_up:.3g} times the samples per second of one worker, "
        f"an efficiency of {speed_up / plan.workers:.0%}. {step}."
    )


def _failures(plan: "Plan") -> list[str]:
    """Say what failures leave of the work, and whether another strategy would be chosen without them."""
    best, fastest = plan.best, _fastest([each for each in plan.predictions if each.exact == plan.best.exact])
    if plan.failures is None or plan.workers == 1:
        return []
    said = f"Failures leave {best.goodput:.1%} of its work, if {plan.failures}"
    if plan.restart_share is not None:
        said += f"; to start all workers again from a checkpoint at every change would leave {plan.restart_share:.1%}"
    if fastest is best:
        return [f"{said}."]
    return [
        f"{said}.",
        f"Without failures {fastest.strategy} would be the fastest, with steps of {format_time(fastest.step_s)}; they "
        f"leave {fastest.goodput:.1%} of its work.",
    ]


def _exactness(plan: "Plan") -> list[str]:
    """Compare the fastest exact strategy with the fastest lossy one."""
    exact = [prediction for prediction in plan.predictions if prediction.exact]
    lossy = [prediction for prediction in plan.predictions if not prediction.exact]
    if not exact or not lossy:
        return []
    fastest_exact, fastest_lossy = _fastest(exact), _fastest(lossy)
    if not plan.best.exact:
        gain = fastest_exact.step_s / plan.best.step_s
        return [
            f"It is lossy, and {gain:.2g} times as fast as {fastest_exact.strategy}, the fastest exact strategy; "
            "accuracy is not predicted."
        ]
    share = fastest_lossy.step_s / fastest_exact.step_s
    return [f"It is exact; {fastest_lossy.strategy}, the fastest lossy strategy, would take {share:.0%} of its time."]


def _run_length(plan: "Plan") -> list[str]:
    """Say for which runs a strategy with local steps is right, or that the run is too short for some."""
    if plan.num_steps is None:
        needed = least_steps(plan.best.strategy)
        every = plan.best.strategy.steps_per_exchange
        return [f"It exchanges every {every} steps: use it in runs of {needed} steps or more."] if needed > 1 else []
    if plan.compress is None:  # Only exact strategies were considered, and those exchange in every step.
        return []
    longest = max(1, plan.num_steps // LEAST_EXCHANGES)
    return [f"The run has {plan.num_steps} steps: blocks of more than {longest} local steps were not considered."]


def _codecs(plan: "Plan") -> list[str]:
    """Say that compression is not worthwhile, where that was a question."""
    if plan.compress is not False:  # None: codecs were not considered.
        return []
    compressed, plain = fastest_means(plan.predictions)
    if compressed is None or plain is None:
        return []
    share = compressed.step_s / plain.step_s
    return [
        f"Do not compress: {compressed.strategy}, the fastest codec, takes {share:.0%} of the time of {plain.strategy}."
    ]


def _fastest(predictions: list[Prediction]) -> Prediction:
    return min(predictions, key=lambda prediction: prediction.step_s)
