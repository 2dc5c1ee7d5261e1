"""How far predictions are off, and whether the planner's first choice was a good one: the arithmetic."""

import pytest

from tutti.bench.planner_accuracy import PlannerChoice, PredictionCheck, error_summary, num_right, planner_choices
from tutti.plan import Prediction
from tutti.strategies import parse


def row(
    strategy: str, predicted_s: float, measured_s: float, model: str = "net", num_bytes: float = 1.0
) -> PredictionCheck:
    prediction = Prediction(
        strategy=parse(strategy),
        workers=4,
        num_samples=64,
        total_samples=256,
        step_s=predicted_s,
        computing_s=0.0,
        exposed_s=predicted_s,
        bytes_per_step=num_bytes,
        memory_bytes=0.0,
    )
    return PredictionCheck(model, "1gbit", prediction, measured_s)


def test_errors_are_relative_to_what_was_measured() -> None:
    assert row("ring", 0.09, 0.10).error == pytest.approx(-0.1)
    assert row("ring", 0.30, 0.10).error == pytest.approx(2.0)


def test_the_median_and_the_worst_of_too_fast_and_too_slow() -> None:
    rows = [row("ring", 0.96, 1.0), row("tree", 1.02, 1.0), row("ps:bsp", 0.7, 1.0)]
    assert error_summary(rows) == (pytest.approx(0.04), pytest.approx(0.3))


def test_a_choice_is_right_within_a_tenth_of_the_fastest() -> None:
    """What is chosen goes by predictions, what is fastest by measurements."""
    for measured_s, right in ((1.09, True), (1.11, False)):
        (choice,) = planner_choices([row("tree", 0.9, measured_s), row("ring", 1.0, 1.0)])
        assert (choice.allowed, choice.chosen, choice.fastest) == ("exact", "tree", "ring")
        assert choice.times == pytest.approx(measured_s)
        assert choice.right is right
        assert choice.as_dict()["right"] is right


def test_the_fastest_itself_is_right_however_wrong_its_prediction() -> None:
    (choice,) = planner_choices([row("tree", 9.0, 1.0), row("ring", 99.0, 2.0)])
    assert (choice.chosen, choice.times, choice.right) == ("tree", 1.0, True)


def test_exact_ones_are_compared_among_themselves_and_then_with_all() -> None:
    rows = [row("ring", 1.0, 1.0), row("onebit", 0.5, 0.6), row("gossip", 0.52, 0.3)]
    exact, every = planner_choices(rows)
    assert (exact.allowed, exact.chosen, exact.fastest) == ("exact", "ring", "ring")
    assert (every.allowed, every.chosen, every.fastest) == ("lossy too", "onebit", "gossip")
    assert every.times == pytest.approx(2.0)


def test_the_planners_own_rule_is_followed() -> None:
    """What is lossy and hardly faster is not chosen, though it was measured as the fastest."""
    exact, every = planner_choices([row("ring", 1.0, 1.0), row("bf16", 0.95, 0.8)])
    assert exact.right
    assert (every.chosen, every.fastest) == ("ring", "bf16")
    assert not every.right


def test_every_model_and_link_is_a_case() -> None:
    rows = [row("ring", 1.0, 1.0), row("tree", 2.0, 0.5), row("ring", 2.0, 1.0, "other"), row("gossip", 1.0, 1.0)]
    found = planner_choices(rows)
    assert [(choice.model, choice.allowed) for choice in found] == [
        ("net", "exact"),
        ("net", "lossy too"),
        ("other", "exact"),
    ]
    assert num_right(found, "exact") == (1, 2)
    assert num_right(found, "lossy too") == (0, 1)


def test_without_exact_ones() -> None:
    (choice,) = planner_choices([row("gossip", 1.0, 1.0), row("onebit", 2.0, 2.0)])
    assert choice == PlannerChoice("net", "1gbit", "lossy too", "gossip", "gossip", 1.0)
