"""`job.start_synchronously`: the first steps are those of one worker, under every strategy that has such a start."""

import copy
from typing import Any

import pytest
import torch
from harness import compiler
from torch import Tensor, nn

from support import run_ok, run_threads
from tutti.errors import ConfigError, RankLost
from tutti.job import distribute
from tutti.recipes.loop import measure_agreed
from tutti.strategies import parse
from tutti.world import World

SIZE = 3
PATHS = [
    ("ps:ssp=3", "shared_memory"),
    ("ps:ssp=3", "sockets"),
    ("ps:ssp=3", "simulated"),
    ("ps:ssp=2,eager,bucket_bytes=300", "simulated"),
    ("ps:ssp=2,overlap=0", "shared_memory"),
    ("ps:ssp=2,clip=0.1", "shared_memory"),
    ("ps:ssp=2,servers=1,clip=0.1", "sockets"),
    ("poseidon:ssp=2", "simulated"),
    ("ps:softsync=2", "simulated"),
    ("ps:softsync=2,servers=2", "simulated"),
    ("ps:async", "simulated"),
    ("ps:async,aware,servers=1", "sockets"),
    ("ps:softsync=2,bucket_bytes=300", "sockets"),
    ("ps:async+topk:0.1", "simulated"),
    ("ps:ssp=3+onebit", "shared_memory"),
    ("ps:bsp+topk:0.1", "sockets"),
]
"""Strategies and transports: by messages or in shared memory, pulls of both kinds, shards apart and joint. They
start in place."""
CHANGES = [
    ("ps:softsync=2", "shared_memory"),
    ("ps:async", "shared_memory"),
    ("ps:async,locks,aware", "shared_memory"),
    ("peers", "simulated"),
    ("peers:inbox=1", "sockets"),
    ("peers+threshold", "shared_memory"),
    ("averaging:every=3", "shared_memory"),
    ("diloco:every=4", "simulated"),
    ("bmuf:every=4+onebit", "sockets"),
    ("onebit", "sockets"),
    ("topk:0.1", "shared_memory"),
]
"""Those whose start is by the exchange of another strategy."""


def net() -> nn.Sequential:
    """The same every time, whatever other ranks draw meanwhile."""
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(torch.sin(7.0 * torch.arange(p.numel(), dtype=torch.float64) + number).view_as(p))
    return model


def whole_batch(step: int) -> Tensor:
    return torch.randn(4 * SIZE, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def values(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def alone(steps: int, clip: float | None = None) -> Tensor:
    """Plain PyTorch on whole batches; from step 4 on with other rates, as a schedule sets them."""
    model = net()
    optimizer = sgd(model)
    for number in range(steps):
        if number == 4:
            slower(optimizer)
        model(whole_batch(number)).square().mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def slower(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group.update(lr=0.02, momentum=0.5)


def trained(
    world: World, strategy: str, steps: list[int], start: int, saved: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What a rank holds after its steps, and the staleness of its updates; from step 4 on with other rates."""
    model = net()
    optimizer = sgd(model)
    if saved is not None:
        saved = copy.deepcopy(saved)  # Ranks are threads, and an optimiser steps the very tensors that it is given.
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    job = distribute(model, optimizer, strategy, world=world)
    job.start_synchronously(start)
    if saved is not None:
        job.load_state_dict(saved["job"])
    for number in range(job.steps, steps[job.world.rank]):
        if number == 4:
            slower(optimizer)
        step(model, optimizer, whole_batch(number).tensor_split(SIZE)[job.world.rank])
    state = job.state_dict()
    with job.consensus():
        state = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "job": state})
    staleness, attached = job.metrics.strategy.get("staleness"), str(job._attached)
    job.finish()
    return {"values": values(model), "staleness": staleness, "saved": state, "attached": attached}


def size_of(strategy: str) -> int:
    return SIZE + parse(strategy).num_dedicated_servers


@pytest.mark.parametrize(("strategy", "transport"), [*PATHS, *CHANGES])
def test_the_steps_of_the_start_are_those_of_one_worker(strategy: str, transport: str) -> None:
    """With rates that change during it."""
    found = run_ok(trained, strategy, [8] * SIZE, 8, size=size_of(strategy), transport=transport)[:SIZE]
    clip = 0.1 if "clip" in strategy else None
    for rank in found:
        torch.testing.assert_close(rank["values"], alone(8, clip), rtol=1e-9, atol=1e-12)
        assert rank["staleness"] in ({0: 8}, None)


@pytest.mark.parametrize(
    ("strategy", "transport"), [case for case in PATHS if case[1] == "simulated" and "ssp" in case[0]]
)
def test_after_the_start_updates_are_as_stale_as_the_strategy_allows(strategy: str, transport: str) -> None:
    bound = parse(strategy).servers.consistency.bound if "poseidon" in strategy else parse(strategy).consistency.bound
    stale, started = (
        run_ok(trained, strategy, [16] * SIZE, start, size=size_of(strategy), transport=transport) for start in (0, 8)
    )
    assert all(max(rank["staleness"]) == bound for rank in (*stale, *started))
    assert all(rank["staleness"][0] >= 8 for rank in started)
    assert all(rank["staleness"].get(0, 0) < 8 for rank in stale)


@pytest.mark.parametrize(("strategy", "transport"), [*PATHS, *CHANGES])
@pytest.mark.parametrize("start", [3, 8], ids=["after the start", "during the start"])
def test_a_run_continues_in_either_part(strategy: str, transport: str, start: int) -> None:
    """A run that was saved after 5 steps: its start is over, or goes on for 3 more."""
    size = size_of(strategy)
    first = run_ok(trained, strategy, [5] * SIZE, 5, size=size, transport=transport)
    rest = run_ok(trained, strategy, [9] * SIZE, start, first[0]["saved"], size=size, transport=transport)[:SIZE]
    if start == 3:
        if (strategy, transport) in CHANGES:
            assert all(rank["attached"] == strategy for rank in rest)
            return
        assert all(sum(rank["staleness"].values()) == 4 for rank in rest)
        assert transport != "simulated" or any(max(rank["staleness"]) > 0 for rank in rest)
        return
    again = run_ok(trained, strategy, [8] * SIZE, 8, first[0]["saved"], size=size, transport=transport)[:SIZE]
    clip = 0.1 if "clip" in strategy else None
    if (strategy, transport) in PATHS:
        assert all(rank["staleness"][0] >= 3 for rank in rest)
    for rank in again:
        assert rank["staleness"] in ({0: 3}, None)
        torch.testing.assert_close(rank["values"], alone(8, clip), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("strategy", "transport"), PATHS)
def test_workers_may_have_different_numbers_of_steps_left(strategy: str, transport: str) -> None:
    """Some end during the start, some after it: the others go on, and all end with the same parameters."""
    found = run_ok(trained, strategy, [4, 7, 12], 6, size=size_of(strategy), transport=transport)[:SIZE]
    assert [sum(rank["staleness"].values()) for rank in found] == [4, 7, 12]
    assert found[0]["staleness"] == {0: 4}
    assert all(torch.equal(rank["values"], found[0]["values"]) for rank in found)


@pytest.mark.parametrize(
    ("strategy", "transport"),
    [
        ("ps:ssp=3", "shared_memory"),
        ("ps:ssp=3,servers=1", "sockets"),
        ("ps:async,servers=1", "sockets"),
        ("ps:softsync=2,servers=2", "sockets"),
    ],
)
def test_the_others_go_on_when_a_worker_is_lost_during_the_start(strategy: str, transport: str) -> None:
    def train(world: World) -> Tensor:
        model = net()
        optimizer = sgd(model)
        job = distribute(model, optimizer, strategy, world=world)
        job.start_synchronously(6)
        for number in range(8):
            if number == 3 and job.world.rank == 1:
                world.close()
                raise KeyError("this worker fails")
            step(model, optimizer, whole_batch(number).tensor_split(SIZE)[job.world.rank])
        job.finish()
        return values(model)

    found = run_threads(train, size=size_of(strategy), transport=transport)[:SIZE]
    assert isinstance(found[1], KeyError)
    assert torch.equal(found[0], found[2])


EXACT_AFTERWARDS = [
    (f"ps:softsync={SIZE}", "simulated"),
    (f"ps:softsync={SIZE}", "shared_memory"),
    ("averaging:every=1", "shared_memory"),
    ("averaging:every=1", "simulated"),
    ("onebit:exact_below=1000", "sockets"),
]
"""Strategies that take the steps of one worker in this example, by another exchange than in the start."""


@pytest.mark.parametrize(("strategy", "transport"), EXACT_AFTERWARDS)
def test_momentum_goes_on_behind_the_start(strategy: str, transport: str) -> None:
    for rank in run_ok(trained, strategy, [9] * SIZE, 6, size=SIZE, transport=transport):
        torch.testing.assert_close(rank["values"], alone(9), rtol=1e-9, atol=1e-12)
        assert rank["attached"] == strategy


@pytest.mark.parametrize(("strategy", "transport"), EXACT_AFTERWARDS)
def test_sums_stay_sums(strategy: str, transport: str) -> None:
    """Exchanges differ in who multiplies the gradient of a sum over samples."""

    def summed(world: World) -> Tensor:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        job = distribute(model, optimizer, strategy, world=world)
        job.expect(loss="sum")
        job.start_synchronously(2)
        for number in range(4):
            model(whole_batch(number).tensor_split(SIZE)[world.rank]).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        job.finish()
        return values(model)

    if not parse(strategy).steps_by_mean_gradient:
        return  # It refuses sums.
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for number in range(4):
        model(whole_batch(number)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ok(summed, size=SIZE, transport=transport):
        torch.testing.assert_close(found, values(model), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("strategy", "transport"), [case for case in CHANGES if case[1] != "simulated"])
def test_ranks_that_end_at_different_steps_of_the_start_get_an_error(strategy: str, transport: str) -> None:
    """Its steps are those of all ranks. In place, each may end when it likes."""
    found = run_threads(trained, strategy, [4, 7, 12], 6, size=SIZE, transport=transport)
    assert all(isinstance(error, Exception) for error in found)
    assert any("rank 0 is in job." in str(error) for error in found), found


def test_a_loss_during_the_start_ends_the_run_if_it_is_not_in_place() -> None:
    def train(world: World) -> None:
        model = net()
        optimizer = sgd(model)
        job = distribute(model, optimizer, "peers", world=world)
        job.start_synchronously(6)
        for number in range(8):
            if number == 3 and world.rank == 1:
                world.close()
                raise KeyError("this worker fails")
            step(model, optimizer, whole_batch(number).tensor_split(SIZE)[world.rank])

    found = run_threads(train, size=SIZE, transport="sockets")
    assert isinstance(found[1], KeyError)
    assert all(isinstance(found[rank], RankLost) for rank in (0, 2)), found


@pytest.mark.parametrize("strategy", ["peers", "ps:async"])
def test_a_rank_may_be_away_from_the_end_of_the_start_on(strategy: str) -> None:
    """As the leader is that evaluates alone: the others change to the strategy, for which they need it."""

    def train(world: World) -> str:
        model = net()
        optimizer = sgd(model)
        job = distribute(model, optimizer, strategy, world=world)
        job.start_synchronously(3)
        for number in range(6):
            if number == 3 and world.rank == 0:
                with job.away():
                    attached = str(job._attached)
            step(model, optimizer, whole_batch(number).tensor_split(SIZE)[world.rank])
        attached = str(job._attached)
        job.finish()
        return attached

    for transport in ("shared_memory", "simulated"):
        assert run_ok(train, size=SIZE, transport=transport) == [strategy] * SIZE


@pytest.mark.parametrize("strategy", ["native", "ps:bsp", "ps:ssp=0", "gossip"])
def test_refused_where_there_is_no_other_strategy_to_start_with(strategy: str) -> None:
    def start(world: World) -> None:
        model = net()
        job = distribute(model, sgd(model), strategy, world=world)
        job.start_synchronously(0)
        try:
            job.start_synchronously(3)
        finally:
            job.finish()

    for error in run_threads(start, size=2, transport="simulated"):
        assert isinstance(error, ConfigError), error
        assert f"strategy '{strategy}' has no synchronous start" in str(error)


@pytest.mark.parametrize("strategy", ["ps:ssp=1", "peers"])
def test_refused_with_different_numbers(strategy: str) -> None:
    def start(world: World) -> None:
        model = net()
        with distribute(model, sgd(model), strategy, world=world) as job:
            job.start_synchronously(3 + world.rank)

    for error in run_threads(start, size=2, transport="sockets"):
        assert isinstance(error, ConfigError), error
        assert "rank 0 gave 3 steps, rank 1 gave 4" in str(error)


def test_refused_with_a_negative_number() -> None:
    def start(world: World) -> None:
        model = net()
        with distribute(model, sgd(model), "ps:ssp=1", world=world) as job:
            job.start_synchronously(-1)

    for error in run_threads(start, size=2, transport="simulated"):
        assert isinstance(error, ConfigError), error
        assert "0 steps or more, got -1" in str(error)


@pytest.mark.parametrize("way", ["compiled", "forward"])
def test_refused_where_the_model_calls_no_hooks_that_could_end_the_start(way: str) -> None:
    def train(world: World) -> int:
        model = net()
        optimizer = sgd(model)
        job = distribute(model, optimizer, "averaging:every=3", world=world)
        job.start_synchronously(2)
        forward = torch.compile(model, backend="eager") if way == "compiled" else model.forward
        for number in range(4):
            with compiler:
                out = forward(whole_batch(number).tensor_split(2)[world.rank])
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return job.steps

    for error in run_threads(train, size=2, transport="sockets"):
        assert isinstance(error, ConfigError), error
        assert "the synchronous start of 'averaging:every=3' is over after 2 steps" in str(error)
        assert "pass the result of torch.compile to distribute" in " ".join(str(error).split())


def test_a_model_that_is_compiled_first_ends_the_start() -> None:
    def train(world: World) -> str:
        model = torch.compile(net(), backend="eager")
        optimizer = sgd(model)
        job = distribute(model, optimizer, "averaging:every=3", world=world)
        job.start_synchronously(2)
        for number in range(4):
            model(whole_batch(number).tensor_split(2)[world.rank]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        attached = str(job._attached)
        job.finish()
        return attached

    assert run_ok(train, size=2, transport="sockets") == ["averaging:every=3"] * 2


@pytest.mark.parametrize(
    ("strategy", "transport"), [("peers", "sockets"), ("ps:async", "sockets"), ("ps:async", "shared_memory")]
)
def test_the_leader_that_evaluates_takes_part_in_the_steps_of_the_start(strategy: str, transport: str) -> None:
    """At the end of an epoch it is away otherwise, as no step of these strategies needs it."""

    def train(world: World) -> list[bool]:
        model = net()
        optimizer = sgd(model)
        job = distribute(model, optimizer, strategy, world=world)
        job.start_synchronously(3)
        away: list[bool] = []
        for number in range(4):
            if number >= 2:
                measure_agreed(job, lambda _: away.append(job._replica.away), last=False)
            step(model, optimizer, whole_batch(number).tensor_split(SIZE)[world.rank])
        job.finish()
        return away

    assert run_ok(train, size=SIZE, transport=transport)[0] == [False, True]


@pytest.mark.parametrize("strategy", ["peers", "averaging:every=3"])
def test_a_rank_may_end_where_the_start_ends(strategy: str) -> None:
    """The others go on, and change to the strategy first, for which they need it."""

    def train(world: World) -> Tensor:
        model = net()
        optimizer = sgd(model)
        job = distribute(model, optimizer, strategy, world=world)
        job.start_synchronously(3)
        for number in range([3, 5, 6][world.rank]):
            step(model, optimizer, whole_batch(number).tensor_split(SIZE)[world.rank])
        job.finish()
        return values(model)

    found = run_ok(train, size=SIZE, transport="sockets")
    assert all(torch.equal(end, found[0]) for end in found)
