"""Each mistake gets one clear error, on every rank, and none hangs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from support import TRANSPORTS, run_ok, run_threads
from tutti.collectives import ring
from tutti.errors import ConfigError, NonFiniteLoss, RankLost, ReplicaMismatch, UnknownName
from tutti.job import distribute
from tutti.strategies import AllReduce, parse
from tutti.strategies.allreduce import NAMES
from tutti.world import World

both = pytest.mark.parametrize("transport", TRANSPORTS)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def expect_on_all(results: list[object], kind: type[Exception], *texts: str) -> None:
    for result in results:
        assert isinstance(result, kind), result
        for text in texts:
            assert text in str(result)


@both
def test_models_that_differ_in_shape(transport: str) -> None:
    def work(world: World) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 4 if world.rank == 1 else 5))
        distribute(model, sgd(model), world=world)

    results = run_threads(work, size=3, transport=transport)
    expect_on_all(results, ReplicaMismatch, "first at '1.weight'", "rank 0 has '1.weight' (5, 3)", "rank 1", "(4, 3)")


@both
def test_models_of_which_one_has_more(transport: str) -> None:
    def work(world: World) -> None:
        model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(1 + world.rank)])
        distribute(model, sgd(model), world=world)

    expect_on_all(run_threads(work, size=2, transport=transport), ReplicaMismatch, "only rank 1 has '1.weight'")


@both
def test_models_that_differ_in_what_is_frozen(transport: str) -> None:
    def work(world: World) -> None:
        model = nn.Linear(2, 2)
        model.bias.requires_grad_(world.rank == 0)
        distribute(model, sgd(model), world=world)

    results = run_threads(work, size=2, transport=transport)
    expect_on_all(results, ReplicaMismatch, "'bias' (2,) float32 on cpu, trained", "frozen")


@both
def test_a_parameter_the_optimiser_does_not_hold(transport: str) -> None:
    def work(world: World) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        held = model if world.rank == 0 else model[0]  # One rank's mistake is everyone's error.
        distribute(model, sgd(held), world=world)

    results = run_threads(work, size=2, transport=transport)
    expect_on_all(results, ConfigError, "rank 1: the optimiser does not hold '1.weight', '1.bias'")


@both
def test_nothing_to_train(transport: str) -> None:
    def work(world: World) -> None:
        model = nn.Linear(2, 2)
        optimizer = sgd(model)
        distribute(model.requires_grad_(False), optimizer, world=world)

    expect_on_all(run_threads(work, size=2, transport=transport), ConfigError, "no trainable parameter")


@both
def test_distribute_twice(transport: str) -> None:
    def work(world: World) -> None:
        model = nn.Linear(2, 2)
        distribute(model, sgd(model), world=world)
        distribute(model, sgd(model), world=world)

    expect_on_all(run_threads(work, size=2, transport=transport), ConfigError, "distributed already", "finish()")


def test_a_text_for_a_strategy() -> None:
    def work(world: World) -> list[str]:
        texts = ["ring", "bmuf:every=16", "onebit"]
        strategies = []
        for text in texts:
            model = nn.Linear(2, 2)
            with distribute(model, sgd(model), strategy=text, world=world) as job:
                strategies.append(job.strategy)
        assert strategies == [parse(text) for text in texts]
        return [str(strategy) for strategy in strategies]

    results = run_threads(work, size=2, transport="sockets")
    assert [result[0] for result in results] == ["ring", "ring"]


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("nativ", "unknown strategy 'nativ'. Did you mean 'native'?"),
        ("averaging:every=0", "Averaging: every must be 1 step or more, got 0"),
        ("", "unknown strategy ''"),
        (7, "strategy must be an object such as tutti.AllReduce('ring') or a text such as 'ring', got 7"),
    ],
)
def test_what_is_no_strategy(strategy: Any, message: str) -> None:
    def work(world: World) -> None:
        model = nn.Linear(2, 2)
        # One rank's mistake is everyone's error, as with any other.
        distribute(model, sgd(model), strategy if world.rank == 1 else None, world=world)

    expect_on_all(run_threads(work, size=2, transport="sockets"), ConfigError, f"rank 1: {message}")


def test_an_unknown_strategy() -> None:
    with pytest.raises(UnknownName, match=r"unknown strategy 'nativ'. Did you mean 'native'\? Known: auto, averaging"):
        parse("nativ")


def test_strategies_print_as_the_text_that_makes_them() -> None:
    for strategy in (AllReduce(), AllReduce(bucket_bytes=7), *map(AllReduce, NAMES), AllReduce("ring", 7)):
        assert parse(str(strategy)) == strategy
    assert str(AllReduce()) == "native"


@pytest.mark.parametrize("text", ["native:bucket_bytes", "native:bucket_bytes=x", "native:size=3"])
def test_a_text_that_is_no_strategy(text: str) -> None:
    with pytest.raises(ConfigError, match="form name:key=number"):
        parse(text)


def test_every_mistake_in_a_strategy_at_once() -> None:
    with pytest.raises(
        ConfigError, match=r"algorithm 'star' is not one of native.*bucket_bytes must be 1 or more, got 0"
    ):
        AllReduce("star", bucket_bytes=0)  # type: ignore[arg-type]


@both
def test_a_sparse_gradient(transport: str) -> None:
    def work(world: World) -> None:
        model = nn.Embedding(5, 2, sparse=True)
        distribute(model, sgd(model), world=world)
        model(torch.tensor([1])).sum().backward()

    expect_on_all(run_threads(work, size=2, transport=transport), ConfigError, "the model has sparse gradients")


@both
def test_a_parameter_unfrozen_later(transport: str) -> None:
    def work(world: World) -> None:
        model = nn.Linear(2, 2)
        model.bias.requires_grad_(False)
        distribute(model, torch.optim.SGD([model.weight, model.bias], lr=0.1), world=world)
        model.bias.requires_grad_(True)
        model(torch.ones(1, 2)).sum().backward()

    expect_on_all(run_threads(work, size=2, transport=transport), ConfigError, "'bias' was frozen", "distribute")


@both
def test_a_backward_that_failed_is_not_passed_over(transport: str) -> None:
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.clone()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            raise RuntimeError("out of memory")

    def work(world: World) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        distribute(model, sgd(model), world=world)
        with pytest.raises(RuntimeError, match="out of memory"):
            model[1](Breaks.apply(model[0](torch.ones(1, 2)))).sum().backward()
        model(torch.ones(1, 2))

    expect_on_all(run_threads(work, size=2, transport=transport), ConfigError, "failed half-way", "restart")


@both
def test_a_loss_that_is_not_finite(transport: str) -> None:
    def work(world: World) -> None:
        model = nn.Linear(2, 2)
        optimizer = sgd(model)
        job = distribute(model, optimizer, world=world)
        for step in range(3):
            loss = model(torch.ones(1, 2)).sum()
            if step == 2 and world.rank == 1:
                loss = loss * float("nan")
            job.watch(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    results = run_threads(work, size=3, transport=transport)
    for rank, result in enumerate(results):
        assert isinstance(result, NonFiniteLoss)
        assert str(result).startswith(f"rank {rank}: the loss on rank 1 is NaN or infinite at step 2.")


@pytest.mark.parametrize(
    ("strategy", "transport"),
    [
        ("native", "shared_memory"),
        ("native", "simulated_memory"),
        ("native", "sockets"),
        ("ring", "simulated"),
        ("onebit", "simulated"),
        ("poseidon:rule=broadcast", "simulated"),
        ("bmuf:every=1", "simulated"),
        ("ps:ssp=1", "simulated"),
        ("ps:ssp=1", "shared_memory"),
        ("ps:async", "shared_memory"),
        ("gossip", "simulated"),
        ("gossip:pairs=async", "simulated"),
        ("peers", "simulated"),
    ],
)
def test_a_loss_that_is_not_finite_is_reported_by_world_rank(strategy: str, transport: str) -> None:
    """The job is on a channel of ranks 2 and 1, which are ranks 0 and 1 of that channel."""

    def work(world: World) -> None:
        if world.rank == 0:
            return
        pair = world.transport.channel("pair", [2, 1])
        model = nn.Linear(2, 2)
        optimizer = sgd(model)
        job = distribute(model, optimizer, strategy, world=replace(world, rank=pair.rank, size=2, transport=pair))
        for step in range(5):
            loss = model(torch.ones(1, 2)).sum() * (float("nan") if (step, world.rank) == (1, 2) else 1.0)
            job.watch(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        job.finish()  # Without synchronous steps, this rank may learn of the other's loss here.

    _, *results = run_threads(work, size=3, transport=transport)
    for rank, result in enumerate(results, 1):
        assert isinstance(result, NonFiniteLoss), result
        assert str(result).startswith(f"rank {rank}: the loss on rank 2 is NaN or infinite at step ")
        assert result.elsewhere == (rank == 1)


@pytest.mark.parametrize("transport", ["sockets", "simulated"])
def test_tensors_that_differ_are_reported_by_world_rank(transport: str) -> None:
    def work(world: World) -> None:
        if world.rank > 0:
            ring(torch.zeros(world.rank), world.transport.channel("pair", [2, 1]))

    _, *results = run_threads(work, size=3, transport=transport)
    for rank, result in enumerate(results, 1):
        assert isinstance(result, ReplicaMismatch)
        assert str(result).startswith(f"rank {rank}: ring needs tensors of one length")
        assert "rank 2 has 2 × torch.float32; rank 1 has 1 × torch.float32" in str(result)


def test_a_loss_that_is_not_finite_alone() -> None:
    def work(world: World) -> None:
        model = nn.Linear(2, 2)
        job = distribute(model, sgd(model), world=world)
        job.watch(torch.tensor(float("inf")))

    expect_on_all(run_threads(work, size=1, transport=""), NonFiniteLoss, "rank 0", "step 0")


@both
def test_ranks_that_take_different_numbers_of_steps(transport: str) -> None:
    def work(world: World) -> None:
        model = nn.Linear(2, 2)
        with distribute(model, sgd(model), world=world):
            for _ in range(3 if world.rank == 0 else 2):
                model(torch.ones(1, 2)).sum().backward()

    where = "rank 0 began the backward pass of step 1, rank 1 is in job.finish() after step 0"
    expect_on_all(run_threads(work, size=2, transport=transport), ConfigError, where)


@both
def test_a_negative_contribution(transport: str) -> None:
    def work(world: World) -> None:
        model = nn.Linear(2, 2)
        job = distribute(model, sgd(model), world=world)
        with pytest.raises(ConfigError, match="0 or more, got -1"):
            job.contributed(-1)

    run_ok(work, size=2, transport=transport)


@both
def test_optimiser_state_that_cannot_travel(transport: str) -> None:
    def work(world: World) -> None:
        model = nn.Linear(2, 2)
        optimizer = sgd(model)
        if world.rank == 0:
            optimizer.state[model.weight]["history"] = {1, 2}
        distribute(model, optimizer, world=world)

    expect_on_all(
        run_threads(work, size=2, transport=transport), ConfigError, "the optimiser's state", "a set cannot be sent"
    )


@both
def test_state_of_another_model(transport: str) -> None:
    def work(world: World) -> None:
        saved = distribute(other := nn.Linear(2, 3), sgd(other), world=world).state_dict()
        model = nn.Linear(2, 2)
        job = distribute(model, sgd(model), world=world)
        with pytest.raises(ConfigError, match=r"it has 'bias' of shape \(3,\), and this model has .*\(2,\)"):
            job.load_state_dict(saved)

    run_ok(work, size=2, transport=transport)


@both
def test_strategies_that_differ(transport: str) -> None:
    def work(world: World) -> None:
        model = nn.Linear(2, 2)
        distribute(model, sgd(model), AllReduce(bucket_bytes=1 + world.rank), world=world)

    results = run_threads(work, size=2, transport=transport)
    expect_on_all(results, ReplicaMismatch, "the strategy differs", "bucket_bytes=1", "rank 1 has", "bucket_bytes=2")


@both
def test_optimisers_that_differ(transport: str) -> None:
    def work(world: World) -> None:
        model = nn.Linear(2, 2)
        groups = [{"params": [model.weight]}, {"params": [model.bias]}] if world.rank else model.parameters()
        distribute(model, torch.optim.SGD(groups, lr=0.1), world=world)

    expect_on_all(run_threads(work, size=2, transport=transport), ReplicaMismatch, "groups of [2]", "groups of [1, 1]")


@both
def test_a_finish_that_fails_lets_go_all_the_same(transport: str) -> None:
    def work(world: World) -> int:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        job = distribute(model, sgd(model), world=world)
        if world.rank == 0:  # From whom the other takes its buffers: it cannot do without.
            return 0
        with pytest.raises(RankLost):
            job.finish()
        return len(model._forward_pre_hooks)

    assert run_ok(work, size=2, transport=transport)[1] == 0
