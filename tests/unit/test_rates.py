"""Learning rates by the rule of the strategy and of the batch, and what the command line says about them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset

import tutti
from command import Call
from tutti.cli.training_run import check_target
from tutti.errors import TargetMissed
from tutti.recipes import Recipe, Splits, digits, training
from tutti.recipes.learning_rate import combined_rule, set_rate
from tutti.recipes.training import TrainingConfig, train
from tutti.simulation.runs.simulate import simulate
from tutti.strategies import parse
from tutti.strategies.parameter_server import SSP, Async, SoftSync, StalenessAware
from tutti.strategies.rates import SAME_RATE, batch_rule


@pytest.mark.parametrize(
    ("text", "workers", "factor"),
    [
        ("ring", 8, 1.0),
        ("onebit", 8, 1.0),
        ("ps:bsp", 8, 1.0),
        ("ps:ssp=0", 8, 1.0),
        ("ps:ssp=1", 8, 1 / 2),
        ("ps:ssp=3", 8, 1 / 4),
        ("ps:ssp=3", 1, 1.0),
        ("poseidon:ssp=2", 8, 1 / 3),
        ("ps:async", 8, 1 / 8),
        ("ps:softsync=2", 8, 1 / 4),
        ("ps:softsync=8", 8, 1.0),
        ("ps:async,aware", 8, 7 / 8),
        ("ps:async,aware", 2, 1 / 2),
        ("ps:ssp=3,aware", 8, 3 / 4),
        ("averaging:every=16", 8, 1.0),
        ("bmuf:every=16", 8, 1 / 8),
        ("bmuf:momentum=0.5,lr=0.25", 8, 1.0),
        ("diloco", 8, 1 / 7),
        ("gossip", 8, 1.0),
        ("peers:inbox=1", 8, 1 / 16),
        ("peers:inbox=3", 8, 1 / 32),
    ],
)
def test_the_rule_of_a_strategy(text: str, workers: int, factor: float) -> None:
    rule = parse(text).learning_rate(workers)
    assert rule.factor == pytest.approx(factor)
    assert bool(rule.reason) == (factor != 1)


def test_stale_updates_take_the_place_of_momentum() -> None:
    """Momentum gives way, as far as there is any, and the effective rate is 1/(staleness + 1)."""
    rule = parse("ps:ssp=3").learning_rate(8)
    assert rule.changed(0.1, 0.9) == pytest.approx((0.125, 0.5))
    assert rule.changed(0.1, 0.5) == pytest.approx((0.05, 0.0))
    assert rule.changed(0.1) == pytest.approx((0.025, 0.0))
    for lr, momentum in ((0.1, 0.9), (0.1, 0.5), (0.1, 0.0)):
        new_lr, new_momentum = rule.changed(lr, momentum)
        assert new_lr / (1 - new_momentum) == pytest.approx(lr / (1 - momentum) / 4)


def test_a_rule_is_applied_to_every_group_of_any_optimiser() -> None:
    rule = parse("ps:ssp=3").learning_rate(8)
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    sgd = torch.optim.SGD([{"params": parameters[:1], "momentum": 0.9}, {"params": parameters[1:]}], lr=0.1)
    rule.apply(sgd)
    assert [group["lr"] for group in sgd.param_groups] == pytest.approx([0.125, 0.025])
    assert [group["momentum"] for group in sgd.param_groups] == pytest.approx([0.5, 0.0])
    adam = torch.optim.Adam(parameters, lr=0.1)
    rule.apply(adam)
    assert (adam.param_groups[0]["lr"], adam.param_groups[0]["betas"]) == (pytest.approx(0.025), (0.9, 0.999))
    assert "momentum" not in adam.param_groups[0]


def test_an_update_that_happens_to_be_fresh_counts_no_more_than_the_usual_one() -> None:
    """It has the samples of one worker of eight: at eight times the rate it would throw the others off."""
    aware = StalenessAware(Async())
    assert [aware.scale(staleness, 8) for staleness in (0, 1, 7, 14)] == [1 / 7, 1 / 7, 1 / 7, 1 / 14]
    assert [StalenessAware(SoftSync(2)).scale(staleness, 8) for staleness in (0, 3, 6)] == [1 / 3, 1 / 3, 1 / 6]
    assert StalenessAware(SoftSync(8)).scale(0, 4) == 1, "fewer workers than the quorum"
    assert [StalenessAware(SSP(3)).scale(staleness, 8) for staleness in (0, 1, 3)] == [1, 1, 1 / 3]
    assert StalenessAware(Async(), lambda staleness: 2.0 - staleness).scale(0, 8) == 2, "a function of the user's"


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

    rule = combined_rule(parse("ps:ssp=1"), optimizer(), num_workers=2, batch_size=512, reference=64, steps=180)
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


@pytest.mark.parametrize(("lr", "used"), [(None, 0.1), ("auto", 0.05), (0.02, 0.02)])
def test_servers_use_the_rate_that_was_set(lr: float | None, used: float) -> None:
    """A run with that number for a rate ends with the same parameters."""
    strategy = "ps:async,servers=1"
    config = TrainingConfig(recipe="digits", strategy=strategy, epochs=1, lr=lr)  # type: ignore[arg-type]
    result = simulate(train, config, workers=3).results[0]
    assert (result.lr, result.momentum) == (pytest.approx(used), 0.9)
    again = simulate(train, TrainingConfig(recipe="digits", strategy=config.strategy, epochs=1, lr=used), workers=3)
    torch.testing.assert_close(result.parameters, again.results[0].parameters)


def test_servers_use_the_momentum_that_was_set() -> None:
    """At the same learning rate, a lower momentum ends elsewhere."""
    strategy = "ps:ssp=3,servers=1"
    configs = [TrainingConfig(recipe="digits", strategy=strategy, epochs=1, lr=lr) for lr in (0.125, "auto")]
    kept, lower = (simulate(train, config, workers=3).results[0] for config in configs)
    assert (kept.lr, kept.momentum) == (0.125, 0.9)
    assert (lower.lr, lower.momentum) == (pytest.approx(0.125), pytest.approx(0.5))
    assert float(lower.parameters.norm()) < float(kept.parameters.norm())


def test_an_evaluation_leaves_steps_that_all_workers_take_together_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the leader a step has fewer samples than its learning rate is for; so has the rest of its data."""

    def much_to_evaluate(*_: Any) -> Recipe:
        def data(folder: Path | None) -> Splits:
            splits = digits().data(folder)
            return Splits(train=splits.train, test=ConcatDataset([splits.test] * 20))

        return replace(digits(), data=data)

    monkeypatch.setattr(training, "recipe", much_to_evaluate)
    config = TrainingConfig(recipe="digits", strategy="ps:ssp=3", epochs=3, lr="auto")
    results = simulate(train, config, workers=8).results
    assert {result.steps for result in results} == {66}
    # What a worker reads for the last step has that many updates of all, or up to 3 fewer, and none of one alone.
    assert {result.strategy_metrics["version"] for result in results} <= {62, 63, 64, 65}


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
    assert "0.125, momentum 0.5 (auto)" in ended.out


def _few_steps(strategy: str, agree: bool) -> torch.Tensor:
    """Parameters after 12 steps of this rank, with `job.consensus` after each if the ranks are to agree."""
    world = tutti.init()
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with tutti.distribute(model, optimizer, strategy=strategy, world=world) as job:
        generator = torch.Generator().manual_seed(world.rank)
        for _ in range(12):
            model(torch.randn(8, 4, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if agree:
                with job.consensus(optimizer=False):
                    pass
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_stale_servers_start_synchronously_where_ranks_agree_after_each_step() -> None:
    """As docs/learning-rates.md recommends for the first half of a training: the steps are those of `ps:bsp`."""
    synchronous, agreeing, stale = (
        simulate(_few_steps, *arguments, workers=4).results[0]
        for arguments in (("ps:bsp", False), ("ps:ssp=3", True), ("ps:ssp=3", False))
    )
    torch.testing.assert_close(agreeing, synchronous)
    assert not torch.allclose(stale, synchronous)


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


def test_bench_rates_quickly(call: Call, tmp_path: Path) -> None:
    ended = call("bench", "rates", "--quick", "--json", "rates.json")
    assert ended.status == 0, ended
    assert "✗" not in ended.out.partition("the slowest seed")[0], ended.out
    assert f"digits ({digits().target:.0%})" in ended.out
    runs = json.loads((tmp_path / "rates.json").read_text())["runs"]
    assert all(run["reached"] and run["epochs"] < digits().epochs for run in runs), "it ends when it is decided"
    assert [run["momentum"] for run in runs] == pytest.approx([0.5, 0.9, 0.9])
    assert call("bench", "rates", "--quick", "--seeds", "2").status == 2
