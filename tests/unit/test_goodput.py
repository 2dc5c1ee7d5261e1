"""The model of goodput under failures: what it counts, and that simulated elastic runs agree with it."""

import random
from typing import Any

import pytest

from profiles import perceptron
from tutti import Cluster, Link
from tutti.bench.elastic.goodput_check import check
from tutti.errors import ConfigError
from tutti.plan import RunSize, plan
from tutti.plan.goodput import (
    FailureCosts,
    FailureRates,
    drawn_events,
    goodput,
    lost_steps,
    restart_goodput,
    useful_work,
)
from tutti.strategies import parse

CLUSTER = Cluster(link=Link("10gbit", "50us"))
RATES = FailureRates.parse("2h", "10m")


def costs(**other: Any) -> FailureCosts:
    """Ten workers that each do a tenth; a loss makes 2 s void and stops all for 3 s, an arrival for 1 s."""
    functions: dict[str, Any] = {
        "rate": lambda alive: alive / 10,
        "void_s": lambda alive: 2.0,
        "loss_pause_s": lambda alive: 3.0,
        "join_pause_s": lambda alive: 1.0,
    }
    return FailureCosts(**{**functions, **other})


def test_a_loss_costs_void_work_a_pause_and_what_the_missing_one_would_have_done() -> None:
    end_s, done = useful_work(costs(), 10, [(100.0, -1), (150.0, 1), (200.0, 0)])
    assert end_s == 200
    assert done == pytest.approx({"useful": 98 + 0.9 * 47 + 49, "void": 2, "missing": 0.1 * 47, "pauses": 4})
    assert sum(done.values()) == pytest.approx(end_s)


def test_no_more_is_void_than_was_done_since_the_last_change() -> None:
    _, done = useful_work(costs(), 10, [(100.0, -1), (104.0, -1), (120.0, 0)])
    assert done["void"] == pytest.approx(2 + 0.9)


def test_losses_within_a_pause_begin_it_anew() -> None:
    _, done = useful_work(costs(), 10, [(100.0, -1), (101.0, -1), (120.0, 0)])
    assert done["pauses"] == pytest.approx(6)


def test_events_have_the_rates_that_were_asked_for() -> None:
    events = list(drawn_events(100, RATES, random.Random(0)))
    losses, end_s = sum(change == -1 for _, change in events[1:]), events[-1][0]
    assert losses / end_s == pytest.approx(100 * RATES.availability / RATES.mtbf_s, rel=0.1)
    assert events == sorted(events, key=lambda event: event[0])


@pytest.mark.parametrize(
    ("strategy", "steps"),
    [("ring", 0.5), ("averaging:every=16", 1 + 1 / 32), ("ps:async", 0.0625), ("gossip", 0.0625), ("ps:bsp", 0.0625)],
)
def test_steps_that_a_loss_of_one_of_eight_makes_void(strategy: str, steps: float) -> None:
    assert lost_steps(parse(strategy), 8) == pytest.approx(steps)


def test_restarts_cost_more_the_more_workers_there_are() -> None:
    profile = perceptron(784, 256, 10, computing_s=0.09)
    ring = parse("ring")
    elastic, restarts = (
        [predict(ring, profile, workers, CLUSTER, RATES).share for workers in (8, 64, 512)]
        for predict in (goodput, restart_goodput)
    )
    assert min(elastic) > 0.8
    assert elastic[0] == pytest.approx(RATES.availability, abs=0.02)
    assert all(one > other for one, other in zip(elastic, restarts, strict=True))
    assert restarts[2] < 0.5
    assert goodput(ring, profile, 64, CLUSTER, RATES) == goodput(ring, profile, 64, CLUSTER, RATES)


@pytest.mark.parametrize(
    ("strategy", "chaos", "within"),
    [
        ("ring", "kill any every 1s; seed 2", 0.03),
        ("averaging:every=8", "kill any every 2s; seed 1", 0.06),
        ("ps:async", "kill any every 2s; seed 1", 0.06),
    ],
)
def test_a_simulated_run_agrees(strategy: str, chaos: str, within: float) -> None:
    checked = check(strategy, 8, chaos, num_steps=60)
    assert checked.losses >= 2
    assert abs(checked.error) < within, checked


@pytest.mark.parametrize(("mtbf", "repair"), [("-2h", "10m"), ("0s", "10m"), ("2h", "0s"), ("often", "10m")])
def test_refused_rates(mtbf: str, repair: str) -> None:
    with pytest.raises(ConfigError, match=r"must be a number of seconds above 0"):
        FailureRates.parse(mtbf, repair)


def test_a_strategy_that_cannot_go_on_is_refused() -> None:
    with pytest.raises(ConfigError, match="has dedicated servers, whose loss ends a run"):
        goodput(parse("ps:bsp,servers=2"), perceptron(8, 8, computing_s=0.01), 8, CLUSTER, RATES)


def test_the_planner_prefers_a_strategy_that_survives() -> None:
    """Recursive doubling is fast for 64 workers, and slow while one of them is missing."""
    profile = perceptron(784, 256, 10, computing_s=0.0012)
    often = FailureRates.parse("1h", "30m")
    calm, stormy = (plan(profile, 64, CLUSTER, run=RunSize(failures=failures)) for failures in (None, often))
    assert {each.goodput for each in calm.predictions} == {1.0}
    best = min(stormy.predictions, key=lambda each: each.useful_step_s)
    assert stormy.best.useful_step_s <= 1.02 * best.useful_step_s
    assert "Failures leave" in stormy.reason
    assert "checkpoint at every change" in stormy.reason
    assert stormy.as_dict()["failures"] == {"mtbf_s": 3600.0, "repair_s": 1800.0}
