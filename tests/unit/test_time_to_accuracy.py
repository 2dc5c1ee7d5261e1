"""The time to an accuracy, where the training starts with other steps than those that the plan has predicted."""

from dataclasses import replace

import pytest

from profiles import perceptron
from tutti.cluster import PRESETS
from tutti.plan import Plan, plan
from tutti.recipes.training import TrainingConfig
from tutti.simulation.runs.time_to_accuracy import time_to_accuracy

CLUSTER = PRESETS["ethernet-1g"]
PROFILE = perceptron(64, 128, 10, computing_s=1e-4, num_samples=32)
TASK = TrainingConfig(recipe="digits", lr="auto", epochs=1, until=0.05)


def plan_of(*texts: str) -> Plan:
    made = plan(PROFILE, 2, CLUSTER, allow_lossy=True)
    by_text = {str(each.strategy): each for each in made.predictions}
    # A speed of their own for each, in the order of the texts: 1, 1/2, ... steps a second.
    chosen = [replace(by_text[text], step_s=float(number)) for number, text in enumerate(texts, 1)]
    return replace(made, predictions=tuple(chosen))


@pytest.mark.parametrize(("lr", "steps_s"), [("auto", 11 * 2.0 + 11 * 1.0), (None, 22 * 1.0)])
def test_a_synchronous_start_takes_its_own_time(lr: str | None, steps_s: float) -> None:
    """Half of an epoch of 22 steps is synchronous."""
    task = replace(TASK, lr=lr)  # type: ignore[arg-type]
    stale = next(
        each
        for each in time_to_accuracy(plan_of("ps:ssp=3", "ps:bsp"), PROFILE, CLUSTER, task)
        if str(each.prediction.strategy) == "ps:ssp=3"
    )
    assert stale.epochs == 1
    # Epochs count whole, with the samples that no batch has.
    assert stale.seconds == pytest.approx(steps_s, rel=0.03)


def test_a_start_that_was_not_planned_is_predicted() -> None:
    (stale,) = time_to_accuracy(plan_of("ps:ssp=3+onebit"), PROFILE, CLUSTER, TASK)
    # 11 steps of 1 s, and as many of the same without staleness, by the formula: a few milliseconds in all.
    assert 11 < stale.seconds < 11.5
