"""Learning rates by the rule of the strategy and of the batch, and what the command line says about them."""

import pytest
import torch
from torch import nn

from command import Call
from tutti.cli.training_run import check_target
from tutti.errors import TargetMissed
from tutti.recipes import digits
from tutti.recipes.learning_rate import combined_rule, set_rate
from tutti.recipes.training import TrainingConfig, train
from tutti.simulation.runs.simulate import simulate
from tutti.strategies import parse
from tutti.strategies.rates import SAME_RATE, batch_rule


@pytest.mark.parametrize(
    ("text", "workers", "factor"),
    [
        ("ring", 8, 1.0),
        ("onebit", 8, 1.0),
        ("ps:bsp", 8, 1.0),
        ("ps:ssp=0", 8, 1.0),
        ("ps:ssp=3", 8, 1 / 3),
        ("ps:ssp=3", 1, 1.0),
        ("poseidon:ssp=2", 8, 1 / 2),
        ("ps:async", 8, 1 / 8),
        ("ps:softsync=2", 8, 1 / 4),
        ("ps:softsync=8", 8, 1.0),
        ("ps:async,aware", 8, 7 / 8),
        ("ps:async,aware", 2, 1 / 2),
        ("ps:ssp=3,aware", 8, 1.0),
        ("averaging:every=16", 8, 1.0),
        ("bmuf:every=16", 8, 1 / 8),
        ("bmuf:momentum=0.5,lr=0.25", 8, 1.0),
        ("diloco", 8, 1 / 7),
        ("gossip", 8, 1.0),
        ("peers:inbox=1", 8, 1 / 8),
        ("peers:inbox=3", 8, 1 / 24),
    ],
)
def test_the_rule_of_a_strategy(text: str, workers: int, factor: float) -> None:
    rule = parse(text).learning_rate(workers)
    assert rule.factor == pytest.approx(factor)
    assert bool(rule.reason) == (factor != 1)


def test_larger_batches_have_a_higher_rate_and_a_warm_up() -> None:
    assert batch_rule(64, 64, 900, adaptive=False) == SAME_RATE
    larger = batch_rule(256, 64, 900, adaptive=False)
    assert (larger.factor, larger.warmup_steps) == (4.0, 50)
    assert batch_rule(256, 64, 900, adaptive=True).factor == 2.0
    assert batch_rule(16, 64, 900, adaptive=False).warmup_steps == 0


def test_a_rate_is_set_on_all_groups_and_warmed_up() -> None:
    def optimizer() -> torch.optim.SGD:
        groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.01)]
        return torch.optim.SGD(groups)

    rule = combined_rule(parse("ps:ssp=2"), optimizer(), num_workers=2, batch_size=512, reference=64, steps=180)
    assert (rule.factor, rule.warmup_steps) == (4.0, 10)
    scaled = optimizer()
    scheduler = set_rate(scaled, "auto", rule)
    assert scheduler is not None
    assert [group["lr"] for group in scaled.param_groups] == pytest.approx([0.1, 0.01]), "the warm-up starts here"
    for _ in range(rule.warmup_steps):
        scaled.step()
        scheduler.step()
    assert [group["lr"] for group in scaled.param_groups] == pytest.approx([0.4, 0.04])
    given = optimizer()
    assert set_rate(given, 0.05, rule) is None
    assert [group["lr"] for group in given.param_groups] == pytest.approx([0.05, 0.005])
    kept = optimizer()
    assert set_rate(kept, None, rule) is None
    assert [group["lr"] for group in kept.param_groups] == [0.1, 0.01]


@pytest.mark.parametrize(("lr", "used"), [(None, 0.1), ("auto", 0.1 / 3), (0.02, 0.02)])
def test_servers_use_the_rate_that_was_set(lr: float | None, used: float) -> None:
    """A run with that number for a rate ends with the same parameters."""
    config = TrainingConfig(recipe="digits", strategy="ps:ssp=3,servers=1", epochs=1, lr=lr)  # type: ignore[arg-type]
    result = simulate(train, config, workers=3).results[0]
    assert result.lr == pytest.approx(used)
    again = simulate(train, TrainingConfig(recipe="digits", strategy=config.strategy, epochs=1, lr=used), workers=3)
    torch.testing.assert_close(result.parameters, again.results[0].parameters)


def test_a_rate_that_does_not_fit_is_warned_of_and_a_missed_target_has_status_3(call: Call) -> None:
    words = ("simulate", "digits", "--workers", "2", "--strategy", "ps:ssp=3", "--jitter", "0.1", "--name", "missed")
    ended = call(*words)
    assert ended.status == 3, ended
    assert "warning: Under 'ssp=3' updates are computed from parameters up to 3 steps old" in ended.err
    assert "is below the recipe's target of 95%" in ended.err
    again = "tutti simulate digits --workers 2 --strategy ps:ssp=3 --jitter 0.1 --lr auto"
    assert f"Try: {again}\n" in ended.err
    ended = call(*again.split()[1:])
    assert (ended.status, ended.err) == (0, ""), ended
    assert "0.0333 (auto)" in ended.out


def test_fewer_epochs_miss_no_target(call: Call) -> None:
    ended = call("simulate", "digits", "--workers", "2", "--epochs", "1", "--lr", "0.001")
    assert ended.status == 0, ended


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        (None, "half the learning rate: tutti --lr 0.05\nor train for longer: tutti --epochs 20"),
        ("auto", "half the learning rate: tutti --lr 0.05\nor train for longer: tutti --lr auto --epochs 20"),
        (0.1, "Try: tutti"),
    ],
)
def test_advice_where_the_rule_changes_nothing(option: str | float | None, advice: str) -> None:
    summary = {"epochs": 10, "accuracy": 0.9, "strategy": "ring", "workers": 2, "lr": 0.1, "lr_option": option}
    with pytest.raises(TargetMissed) as missed:
        check_target(summary, digits(), lambda *words: " ".join(["tutti", *words]))
    assert str(missed.value).endswith(advice)


@pytest.mark.parametrize("text", ["0", "-1", "fast", "nan"])
def test_a_rate_that_is_none(text: str, call: Call) -> None:
    ended = call("train", "digits", "--lr", text)
    assert ended.status == 2
    assert f"--lr takes a number above 0 such as 0.05, or auto; got '{text}'" in ended.err


def test_bench_rates_quickly(call: Call) -> None:
    ended = call("bench", "rates", "--quick", "--json", "rates.json")
    assert ended.status == 0, ended
    assert "✗" not in ended.out.split("✗ below")[0], ended.out
    assert f"digits ({digits().target:.0%})" in ended.out
    assert call("bench", "rates", "--quick", "--seeds", "2").status == 2
