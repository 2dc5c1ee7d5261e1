"""Learning rates by the rule of the strategy and of the batch, and what the command line says about them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader

import tutti
from command import Call
from tutti.cli.training_run import check_target
from tutti.data import GlobalBatches
from tutti.errors import TargetMissed
from tutti.recipes import Recipe, Splits, collate, digits, training
from tutti.recipes.learning_rate import rule_of_batch, set_rate
from tutti.recipes.training import TrainingConfig, train
from tutti.simulation.runs.simulate import simulate
from tutti.strategies import parse
from tutti.strategies.parameter_server import SSP, Async, SoftSync, StalenessAware
from tutti.strategies.rates import SAME_RATE, LearningRateRule, batch_rule


@pytest.mark.parametrize(
    ("text", "workers", "factor"),
    [
        ("ring", 8, 1.0),
        ("onebit", 8, 1 / 2),
        ("onebit", 1, 1.0),
        ("topk:0.001", 8, 1 / 4),
        ("fp16", 8, 1.0),
        ("ps:bsp+onebit", 8, 1 / 2),
        ("ps:bsp+topk", 8, 1 / 4),
        ("ps:ssp=3+onebit", 8, 1 / 16),
        ("ps:bsp", 8, 1.0),
        ("ps:ssp=0", 8, 1.0),
        ("ps:ssp=1", 8, 1 / 4),
        ("ps:ssp=3", 8, 1 / 16),
        ("ps:ssp=3", 1, 1.0),
        ("poseidon:ssp=2", 8, 1 / 9),
        ("ps:async", 8, 1 / 32),
        ("ps:softsync=2", 8, 1 / 16),
        ("ps:softsync=8", 8, 1.0),
        ("ps:async,aware", 8, 7 / 32),
        ("ps:async,aware", 2, 1 / 8),
        ("ps:ssp=3,aware", 8, 3 / 16),
        ("averaging:every=16", 8, 1 / 4),
        ("averaging:every=1", 8, 1.0),
        ("averaging:every=16", 1, 1.0),
        ("bmuf:every=16", 8, 1 / 8),
        ("bmuf:every=16", 2, 1 / 4),
        ("bmuf:momentum=0.5,lr=0.25", 8, 1 / 4),
        ("diloco", 8, 1 / 7),
        ("gossip", 8, 1.0),
        ("peers:inbox=1", 8, 1 / 32),
        ("peers:inbox=3", 8, 1 / 128),
    ],
)
def test_the_rule_of_a_strategy(text: str, workers: int, factor: float) -> None:
    rule = parse(text).learning_rate(workers)
    assert rule.factor == pytest.approx(factor)
    assert bool(rule.reason) == (factor != 1)
    stale = any(name in text for name in ("ssp", "async", "softsync", "peers", "every", "diloco", "bmuf", "topk"))
    assert rule.synchronous_share == (0.5 if stale and factor != 1 else 0)


@pytest.mark.parametrize(("text", "part"), [("ps:ssp=3", 16), ("peers:inbox=3", 16 * 8)])
def test_stale_updates_take_the_place_of_momentum(text: str, part: int) -> None:
    """Momentum gives way, as far as there is any, and the effective rate is divided."""
    rule = parse(text).learning_rate(8)
    for (lr, momentum), lower in (((0.1, 0.9), 0.5), ((0.1, 0.5), 0.0), ((0.1, 0.0), 0.0)):
        new_lr, new_momentum = rule.changed(lr, momentum)
        assert new_momentum == pytest.approx(lower)
        assert new_lr / (1 - new_momentum) == pytest.approx(lr / (1 - momentum) / part)


@pytest.mark.parametrize("text", ["ps:async", "ps:softsync=2", "ps:ssp=3"])
def test_with_adam_gradients_that_servers_scale_down_take_nothing_from_a_rule(text: str) -> None:
    """Its steps do not depend on the scale of gradients; those of SGD do."""
    plain, aware = (parse(each).learning_rate(8) for each in (text, f"{text},aware"))
    for kind in (torch.optim.Adam, torch.optim.RMSprop, torch.optim.SGD):
        adaptive = kind is not torch.optim.SGD
        used = []
        for rule in (plain, aware):
            optimizer = kind([nn.Parameter(torch.zeros(1))], lr=0.1)
            rule.apply(optimizer)
            used.append(rates(optimizer)[0])
            assert rates(optimizer)[0] == rule.changed(0.1, adaptive=adaptive)[0]
        assert (used[0] == pytest.approx(used[1])) == adaptive, kind


def test_the_synchronous_share_in_steps() -> None:
    assert parse("ps:ssp=3").learning_rate(8).synchronous_steps(101) == 50
    assert parse("ps:ssp=3").learning_rate(1).synchronous_steps(101) == 0
    assert parse("ps:bsp").learning_rate(8).synchronous_steps(101) == 0
    combined = LearningRateRule(0.5, reason="Half.") & LearningRateRule(1 / 16, 5, 0, 0.5, 0.25, "Stale.")
    assert combined == LearningRateRule(1 / 32, 5, 0, 0.5, 0.25, "Half. Stale.")


def test_a_rule_is_applied_to_every_group_of_any_optimiser() -> None:
    rule = parse("ps:ssp=3").learning_rate(8)
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    sgd = torch.optim.SGD([{"params": parameters[:1], "momentum": 0.9}, {"params": parameters[1:]}], lr=0.1)
    rule.apply(sgd)
    assert [group["lr"] for group in sgd.param_groups] == pytest.approx([0.03125, 0.00625])
    assert [group["momentum"] for group in sgd.param_groups] == pytest.approx([0.5, 0.0])
    adam = torch.optim.Adam(parameters, lr=0.1)
    rule.apply(adam)
    assert (adam.param_groups[0]["lr"], adam.param_groups[0]["betas"]) == (pytest.approx(0.00625), (0.9, 0.999))
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


def two_groups(**options: float) -> torch.optim.SGD:
    return torch.optim.SGD(
        [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr, **options} for lr in (0.1, 0.01)], momentum=0.9
    )


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def test_a_rate_is_set_on_all_groups_and_warmed_up() -> None:
    scaled = two_groups()
    batch = rule_of_batch(scaled, 512, 64, 180)
    assert (batch.factor, batch.warmup_steps) == (8.0, 10)
    schedule = set_rate(scaled, "auto", LearningRateRule(1 / 2, reason="Half."), batch, 180)
    assert schedule.synchronous_steps == 0
    assert rates(scaled) == pytest.approx([0.05, 0.005]), "the warm-up starts here"
    found = []
    for step in range(12):
        schedule.set(step)
        found.append(rates(scaled)[0])
    assert found == pytest.approx([0.05 * (1 + 0.7 * step) for step in range(10)] + [0.4, 0.4])
    for lr, expected in ((0.05, [0.05, 0.005]), (None, [0.1, 0.01])):
        given = two_groups()
        schedule = set_rate(given, lr, parse("ps:ssp=3").learning_rate(2), batch, 180)
        schedule.set(179)
        assert rates(given) == pytest.approx(expected)
        assert (schedule.synchronous_steps, given.param_groups[0]["momentum"]) == (0, 0.9)


def test_a_start_has_the_rates_of_one_worker_and_the_rest_those_of_the_rule() -> None:
    """In any order of steps: a run that continues from a checkpoint begins anywhere, with whatever rates that had."""
    optimizer, rule = two_groups(), parse("ps:ssp=3").learning_rate(8)
    schedule = set_rate(optimizer, "auto", rule, rule_of_batch(optimizer, 32, 64, 100), 100)
    assert schedule.synchronous_steps == 50
    for step, factor, momentum in ((0, 1, 0.9), (49, 1, 0.9), (99, 5 / 16, 0.5), (50, 5 / 16, 0.5), (10, 1, 0.9)):
        optimizer.param_groups[0].update(lr=7.0, momentum=0.3)
        schedule.set(step)
        assert rates(optimizer) == pytest.approx([0.05 * factor, 0.005 * factor])
        assert [group["momentum"] for group in optimizer.param_groups] == pytest.approx([momentum] * 2)


def test_a_recipe_that_changes_its_rates_itself_may_do_so_where_no_rule_does() -> None:
    optimizer = two_groups()
    schedule = set_rate(optimizer, "auto", parse("ring").learning_rate(8), rule_of_batch(optimizer, 64, 64, 9), 9)
    optimizer.param_groups[0]["lr"] = 7.0
    schedule.set(3)
    assert rates(optimizer) == [7.0, 0.01]


@pytest.mark.parametrize(("lr", "used"), [(None, 0.1), ("auto", 0.1), (0.02, 0.02)])
def test_servers_use_the_rate_that_was_set(lr: float | None, used: float) -> None:
    """A run with that number for a rate ends with the same parameters."""
    strategy = "ps:bsp,servers=1" if lr == "auto" else "ps:async,servers=1"
    config = TrainingConfig(recipe="digits", strategy=strategy, epochs=1, lr=lr)  # type: ignore[arg-type]
    result = simulate(train, config, workers=3).results[0]
    assert (result.lr, result.momentum) == (pytest.approx(used), 0.9)
    again = simulate(train, TrainingConfig(recipe="digits", strategy=config.strategy, epochs=1, lr=used), workers=3)
    torch.testing.assert_close(result.parameters, again.results[0].parameters)


def test_a_run_that_starts_synchronously_is_that_of_a_script_with_the_same_rule() -> None:
    """The script of docs/learning-rates.md, with the loop and the rates written by hand."""
    config = TrainingConfig(recipe="digits", strategy="ps:ssp=3,servers=1", epochs=2, lr="auto")
    result = simulate(train, config, workers=4).results[0]
    assert (result.steps, result.synchronous_steps) == (44, 22)
    assert (result.lr, result.momentum) == (pytest.approx(0.03125), pytest.approx(0.5))
    staleness = result.strategy_metrics["staleness"]
    assert staleness[0] >= 22
    assert max(staleness) == 3

    def script(rule: LearningRateRule) -> torch.Tensor:
        torch.manual_seed(0)
        tutti.init()
        made = digits()
        model, data = made.model(), made.data(None).train
        optimizer = made.optimizer(model)
        with tutti.distribute(model, optimizer, config.strategy) as job:
            sampler = GlobalBatches(len(data), made.batch_size, 3, 0)
            loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)
            batches = tutti.shard(loader, world=job.world)
            start = rule.synchronous_steps(44)
            job.start_synchronously(start)
            for epoch in batches.epochs(2):
                for x, y in epoch:
                    if job.steps == start:
                        rule.apply(optimizer)
                    made.loss(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    rule = parse("ps:ssp=3").learning_rate(3)
    same, other = (simulate(script, each, workers=4).results[0] for each in (rule, replace(rule, momentum_factor=1.0)))
    torch.testing.assert_close(result.parameters, same)
    assert not torch.allclose(result.parameters, other, atol=1e-3), "servers use the momentum"


@pytest.mark.parametrize(
    ("strategy", "lr", "momentum"),
    [("ps:softsync=2,servers=1", 0.1 / 6, 0.9), ("ps:async,aware", 0.1 / 6, 0.9), ("peers", 0.4 / 27, 0.6)],
)
def test_strategies_without_a_bound_start_synchronously_too(strategy: str, lr: float, momentum: float) -> None:
    config = TrainingConfig(recipe="digits", strategy=strategy, epochs=2, lr="auto")
    result = simulate(train, config, workers=3 + parse(strategy).num_dedicated_servers).results[0]
    assert (result.steps, result.synchronous_steps) == (44, 22)
    assert (result.lr, result.momentum) == (pytest.approx(lr), pytest.approx(momentum))
    staleness = result.strategy_metrics["staleness"]
    if strategy != "peers":  # It starts by all-reduce, which counts no staleness.
        assert staleness[0] >= 22
        assert max(staleness) >= 1
    else:
        assert sum(staleness.values()) == 22


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
    text = " ".join(ended.out.replace("│", "").split())
    assert "0.0312, momentum 0.5 (auto, after 110 synchronous steps at the recipe's rate)" in text


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
    assert [run["synchronous_share"] for run in runs] == [0.5, 0.5, 0]
    assert "0.0312, momentum 0.5 after 50%" in ended.out
    assert call("bench", "rates", "--quick", "--seeds", "2").status == 2
