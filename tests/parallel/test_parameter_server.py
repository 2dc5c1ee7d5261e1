"""Parameter servers: results, checkpoints, workers that leave or are lost, malformed messages, invalid arguments."""

import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tutti
from equivalence.scenarios import SCENARIOS, assert_close, batches, part_of, prepare, train_plainly
from support import pairwise, run_ok, run_threads
from tutti.cluster import Cluster, Compute, Link
from tutti.codecs import Codec, ErrorFeedback, LowRank, OneBit, TopK
from tutti.errors import ConfigError, NonFiniteLoss, RankLost, WorkerDropped
from tutti.events import READ
from tutti.job import Job, distribute
from tutti.strategies import BSP, SSP, AllReduce, Async, ParameterServer, SoftSync, StalenessAware, parse
from tutti.strategies.parameter_server import Consistency
from tutti.strategies.parameter_server.messages.wire import (
    NO_PULL,
    PAYLOAD_TAG,
    REQUEST_TAG,
    RequestHeader,
    RequestKind,
)
from tutti.world import World

BY_MESSAGES = ("simulated", "sockets", "hosts")
everywhere = pytest.mark.parametrize("transport", BY_MESSAGES)

ROWS = 12
"""Of a batch of all workers: 2, 3 and 4 of them have the same number of rows each."""


def net() -> nn.Sequential:
    """Large enough that servers get several shards of it."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(24, 60), nn.Tanh(), nn.Linear(60, 20)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
    return model


def whole_batch(step: int) -> Tensor:
    return torch.randn(ROWS, 24, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    first, *rest = model.parameters()
    return torch.optim.AdamW([{"params": [first]}, {"params": rest, "lr": 0.003, "betas": (0.8, 0.9)}], lr=0.01)


Make = Callable[[nn.Module], torch.optim.Optimizer]


def start(world: World, strategy: ParameterServer, make: Make = sgd) -> tuple[nn.Module, torch.optim.Optimizer, Job]:
    model = net()
    optimizer = make(model)
    return model, optimizer, distribute(model, optimizer, strategy, world=world)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def go(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        loss_of(model, whole_batch(step).tensor_split(job.world.size)[job.world.rank]).backward()
        optimizer.step()
        optimizer.zero_grad()


def copied(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def agreed(job: Job, model: nn.Module) -> list[Tensor]:
    with job.consensus():
        return copied(model)


def trained(world: World, strategy: ParameterServer, make: Make = sgd, steps: int = 5) -> list[Tensor]:
    model, optimizer, job = start(world, strategy, make)
    go(job, model, optimizer, range(steps))
    job.finish()
    return copied(model)


def alone(make: Make = sgd, steps: int = 5, clip: float | None = None) -> list[Tensor]:
    """One process, whole batches, plain torch."""
    model = net()
    optimizer = make(model)
    for step in range(steps):
        loss_of(model, whole_batch(step)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return copied(model)


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-13)


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


def size_of(strategy: ParameterServer, workers: int) -> int:
    return workers if strategy.servers == "colocated" else workers + int(strategy.servers)


# Results


@everywhere
@pytest.mark.parametrize("make", [momentum, adamw])
def test_dedicated_servers_end_as_colocated_ones_do(transport: str, make: Make) -> None:
    expected = alone(make)
    for servers in ("colocated", 1, 2):
        strategy = ParameterServer(servers=servers, bucket_bytes=10_000)
        found = run_ok(trained, strategy, make, size=size_of(strategy, 3), transport=transport)
        for each in found[:3]:
            same(each, found[0])
        assert found[3:] == [None] * (len(found) - 3), "a rank that serves does not come back"
        close(found[0], expected)


@everywhere
@pytest.mark.parametrize("servers", ["colocated", 1, 2])
def test_a_schedule_reaches_servers(transport: str, servers: Any) -> None:
    """Learning rates and momenta, of two groups, new at every step."""

    def make(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        first, *rest = model.parameters()
        optimizer = torch.optim.SGD([{"params": [first]}, {"params": rest, "lr": 0.05}], lr=0.1, momentum=0.9)
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.5, 0.2], total_steps=8)

    def train(world: World | None) -> list[Tensor]:
        model = net()
        optimizer, schedule = make(model)
        job = None if world is None else distribute(model, optimizer, ParameterServer(servers=servers), world=world)
        for step in range(6):
            x = whole_batch(step)
            loss_of(model, x if job is None else x.tensor_split(job.world.size)[job.world.rank]).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if job is not None:
            job.finish()
        return copied(model)

    strategy = ParameterServer(servers=servers)
    close(run_ok(train, size=size_of(strategy, 2), transport=transport)[0], train(None))


@everywhere
def test_unused_frozen_and_shared_parameters_on_dedicated_servers(transport: str) -> None:
    scenario = replace(SCENARIOS["momentum"], uneven=True)

    def train(world: World) -> dict[str, Tensor]:
        model, optimizer, _ = prepare(scenario, seed=world.rank)
        job = distribute(model, optimizer, ParameterServer(servers=2, bucket_bytes=300), world=world)
        for batch in batches(scenario):
            x, y = part_of(batch, job.world.rank, job.world.size)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        job.finish()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    assert_close(run_ok(train, size=4, transport=transport)[0], train_plainly(scenario), 1e-10)


@everywhere
@pytest.mark.parametrize("servers", ["colocated", 1])
def test_accumulation(transport: str, servers: Any) -> None:
    def train(world: World, strategy: ParameterServer) -> list[Tensor]:
        model, optimizer, job = start(world, strategy, momentum)
        for step in range(3):
            parts = whole_batch(step).tensor_split(job.world.size)[job.world.rank].tensor_split(3)
            for number, part in enumerate(parts):
                with nullcontext() if number == 2 else job.no_sync():
                    (loss_of(model, part) / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
        job.finish()
        return copied(model)

    strategy = ParameterServer(servers=servers)
    close(run_ok(train, strategy, size=size_of(strategy, 2), transport=transport)[0], alone(momentum, 3))


@everywhere
def test_a_second_backward_is_refused_after_the_first_was_pushed(transport: str) -> None:
    def train(world: World, overlap: bool) -> list[Tensor]:
        model, optimizer, job = start(world, ParameterServer(overlap=overlap), momentum)
        go(job, model, optimizer, range(1))  # The first step pushes in `step`, which allows for a second backward.
        for part in whole_batch(1).tensor_split(world.size)[world.rank].tensor_split(2):
            (loss_of(model, part) / 2).backward()
        optimizer.step()
        job.finish()
        return copied(model)

    for each in run_threads(train, True, size=2, transport=transport):
        assert isinstance(each, ConfigError)
        assert "no_sync()" in str(each)
        assert "overlap=False" in str(each)
    close(run_ok(train, False, size=2, transport=transport)[0], alone(momentum, 2))


@everywhere
def test_batchnorm_statistics_agree_with_all_reduce(transport: str) -> None:
    def train(world: World, strategy: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double()
        with torch.no_grad():
            for number, p in enumerate(model.parameters()):
                p.copy_(torch.linspace(-1, 1 + number, p.numel(), dtype=torch.float64).view(p.shape).sin())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job = distribute(model, optimizer, strategy, world=world)
        go(job, model, optimizer, range(4))
        job.finish()
        return [each.detach().double().clone() for each in model.state_dict().values()]

    expected = run_ok(train, AllReduce(), size=3, transport=transport)
    for strategy in (ParameterServer(), ParameterServer(servers=1), ParameterServer(overlap=False, bucket_bytes=100)):
        found = run_ok(train, strategy, size=size_of(strategy, 3), transport=transport)[:3]
        for each in found:
            close(each, expected[0])


# Clipping


@pairwise(transport=BY_MESSAGES, servers=["colocated", 1, 2], rule=[BSP(), SSP(0)])
def test_servers_clip_as_one_process_does(transport: str, servers: Any, rule: Consistency) -> None:
    strategy = ParameterServer(rule, servers=servers, clip=0.05, bucket_bytes=3000)
    found = run_ok(trained, strategy, momentum, size=size_of(strategy, 3), transport=transport)[:3]
    close(found[0], alone(momentum, clip=0.05))
    assert (found[0][0] - alone(momentum)[0]).abs().max() > 1e-3, "the clip does something"


@pytest.mark.parametrize("rule", [Async(), SoftSync(1)], ids=str)
def test_each_update_is_clipped_by_its_own_norm(rule: Consistency) -> None:
    strategy = ParameterServer(rule, servers=2, clip=0.05, bucket_bytes=3000)
    found = run_ok(trained, strategy, momentum, size=3, transport="sockets")[0]
    close(found, alone(momentum, clip=0.05))


@everywhere
def test_workers_clip_their_own_gradients_without_overlap(transport: str) -> None:
    def train(world: World) -> list[Tensor]:
        model, optimizer, job = start(world, ParameterServer(overlap=False, servers=1))
        for step in range(3):
            loss_of(model, whole_batch(step).tensor_split(2)[job.world.rank]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
        job.finish()
        return copied(model)

    model = net()
    for step in range(3):
        means = [torch.zeros_like(p) for p in model.parameters()]
        for part in whole_batch(step).tensor_split(2):
            loss_of(model, part).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            for mean, p in zip(means, model.parameters(), strict=True):
                assert p.grad is not None
                mean.add_(p.grad, alpha=0.5)
            model.zero_grad()
        with torch.no_grad():
            for mean, p in zip(means, model.parameters(), strict=True):
                p.sub_(mean, alpha=0.5)
    close(run_ok(train, size=3, transport=transport)[0], copied(model))


# Checkpoints


def saved_halfway(world: World, strategy: ParameterServer, make: Make) -> tuple[Any, Any, list[Tensor]]:
    """States after 3 steps; and where 6 lead."""
    model, optimizer, job = start(world, strategy, make)
    go(job, model, optimizer, range(3))
    state = job.state_dict()
    parameters = {name: each.clone() for name, each in model.state_dict().items()}
    go(job, model, optimizer, range(3, 6))
    job.finish()
    return parameters, state, copied(model)


def resumed(world: World, strategy: ParameterServer, make: Make, parameters: Any, state: Any) -> list[Tensor]:
    model = net()
    model.load_state_dict(parameters)
    optimizer = make(model)
    job = distribute(model, optimizer, strategy, world=world)
    job.load_state_dict(state)
    go(job, model, optimizer, range(3, 6))
    job.finish()
    return copied(model)


@pytest.mark.parametrize("transport", ["simulated", "sockets"])
@pytest.mark.parametrize("make", [momentum, adamw])
@pytest.mark.parametrize("servers", ["colocated", 2])
def test_saved_states_hold_whole_parameters_and_resume_exactly(transport: str, make: Make, servers: Any) -> None:
    strategy = ParameterServer(servers=servers, bucket_bytes=10_000)
    size = size_of(strategy, 3)
    found = run_ok(saved_halfway, strategy, make, size=size, transport=transport)[:3]
    parameters, state, final = found[0]
    close(final, alone(make, 6))
    reference = net()
    optimizer = make(reference)
    for step in range(3):
        loss_of(reference, whole_batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    remembered = state["exchange"]["optimizer"]
    for name, p in reference.named_parameters():
        assert remembered[name].keys() == optimizer.state[p].keys()
        for key, value in optimizer.state[p].items():
            torch.testing.assert_close(remembered[name][key], value, rtol=1e-11, atol=1e-13)
            assert remembered[name][key].shape == value.shape
    for _, other, _ in found[1:]:
        for name, values in other["exchange"]["optimizer"].items():
            same(list(values.values()), list(remembered[name].values()))
    for each in run_ok(resumed, strategy, make, parameters, state, size=size, transport=transport)[:3]:
        same(each, final)


@pytest.mark.parametrize("make", [momentum, adamw])
def test_states_load_with_any_number_of_workers_and_servers(make: Make) -> None:
    strategy = ParameterServer(bucket_bytes=10_000)
    parameters, state, final = run_ok(saved_halfway, strategy, make, size=3, transport="sockets")[0]
    for workers in (2, 4):
        found = run_ok(resumed, strategy, make, parameters, state, size=workers, transport="sockets")
        close(found[0], final)
    for servers in (1, 2):
        other = replace(strategy, servers=servers)
        with_other = state | {"strategy": str(other)}
        found = run_ok(resumed, other, make, parameters, with_other, size=2 + servers, transport="sockets")
        close(found[0], final)


@pytest.mark.parametrize("transport", ["simulated", "sockets"])
@pytest.mark.parametrize("servers", ["colocated", 1])
@pytest.mark.parametrize("rule", [BSP(), SSP(0)], ids=str)
def test_loading_an_earlier_state_in_the_same_job(transport: str, servers: Any, rule: Consistency) -> None:
    """What was still to be read of later steps does not overwrite what is loaded."""

    def train(world: World, strategy: ParameterServer) -> tuple[list[Tensor], list[Tensor]]:
        model, optimizer, job = start(world, strategy, momentum)
        go(job, model, optimizer, range(3))
        state = job.state_dict()
        parameters = {name: each.clone() for name, each in model.state_dict().items()}
        go(job, model, optimizer, range(3, 6))
        first = agreed(job, model)
        go(job, model, optimizer, range(6, 8))
        model.load_state_dict(parameters)
        job.load_state_dict(state)
        go(job, model, optimizer, range(3, 6))
        job.finish()
        return first, copied(model)

    strategy = ParameterServer(rule, servers=servers, bucket_bytes=10_000)
    for first, second in run_ok(train, strategy, size=size_of(strategy, 2), transport=transport)[:2]:
        same(first, second)


# Workers that leave or are lost


@pairwise(transport=BY_MESSAGES, servers=["colocated", 1], rule=[BSP(), SSP(1), SoftSync(2), Async()])
def test_workers_may_take_fewer_steps(transport: str, servers: Any, rule: Consistency) -> None:
    def train(world: World, strategy: ParameterServer) -> tuple[int, list[Tensor]]:
        model, optimizer, job = start(world, strategy)
        go(job, model, optimizer, range(2 + 3 * job.world.rank))
        job.finish()
        return job.metrics.steps, copied(model)

    # Of one shard: with several, soft-sync may wait for ever.
    strategy = ParameterServer(rule, servers=servers, bucket_bytes=2**20)
    if isinstance(rule, SoftSync) and servers == "colocated":
        pytest.skip("several servers' quorums wait for each other")
    found = run_ok(train, strategy, size=size_of(strategy, 3), transport=transport)[:3]
    assert [steps for steps, _ in found] == [2, 5, 8]
    for _, parameters in found:
        same(parameters, found[0][1])


def test_the_last_worker_continues_alone_under_bsp() -> None:
    """After the others' last step, a step is made of one worker's gradient."""

    def train(world: World) -> list[Tensor]:
        model, optimizer, job = start(world, ParameterServer(servers=1), momentum)
        for step in range(3 if job.world.rank else 6):
            part = whole_batch(step)
            loss_of(model, part.tensor_split(3)[job.world.rank] if step < 3 else part).backward()
            optimizer.step()
            optimizer.zero_grad()
        job.finish()
        return copied(model)

    for found in run_ok(train, size=4, transport="sockets")[:3]:
        close(found, alone(momentum, 6))


@pytest.mark.parametrize("transport", ["sockets", "hosts"])
@pytest.mark.parametrize("servers", ["colocated", 1])
def test_leave_and_join(transport: str, servers: Any) -> None:
    left, others_done, back = threading.Event(), threading.Event(), threading.Event()

    def train(world: World, strategy: ParameterServer) -> tuple[list[Tensor], list[Tensor]]:
        model, optimizer, job = start(world, strategy, momentum)
        go(job, model, optimizer, range(2))
        if job.world.rank:
            with job.away():
                left.set()
                others_done.wait(20)
            seen = copied(model)
            back.set()
        else:
            left.wait(20)
            go(job, model, optimizer, range(2, 5))
            seen = copied(model)
            others_done.set()
            back.wait(20)
        go(job, model, optimizer, range(5, 7))
        job.finish()
        return seen, copied(model)

    strategy = ParameterServer(servers=servers, overlap=False)
    found = run_ok(train, strategy, size=size_of(strategy, 2), transport=transport)[:2]
    same(found[0][0], found[1][0])
    same(found[0][1], found[1][1])


@pytest.mark.parametrize("rule", [BSP(), SoftSync(2), Async()], ids=str)  # Under SSP one need not read the newest.
@pytest.mark.parametrize("overlap", [True, False])
def test_leave_and_join_in_virtual_time(rule: Consistency, overlap: bool) -> None:
    def train(world: World) -> tuple[list[Tensor], list[Tensor]]:
        model, optimizer, job = start(world, ParameterServer(rule, servers=1, overlap=overlap), momentum)
        go(job, model, optimizer, range(2))
        if job.world.rank:
            with job.away():
                world.transport.elapse(5 - world.transport.now())
            seen = copied(model)
        else:
            world.transport.elapse(1 - world.transport.now())
            go(job, model, optimizer, range(2, 5))
            loss_of(model, whole_batch(0)).detach()  # A forward pass waits for what it needs.
            seen = copied(model)
            world.transport.elapse(9 - world.transport.now())
        go(job, model, optimizer, range(5, 7))
        job.finish()
        return seen, copied(model)

    found = run_ok(train, size=3, transport="simulated")[:2]
    same(found[0][0], found[1][0])
    same(found[0][1], found[1][1])


def lose_worker_1(world: World, strategy: ParameterServer, how: str) -> list[Tensor]:
    model, optimizer, job = start(world, strategy)
    with job if how == "raises" else nullcontext():
        go(job, model, optimizer, range(2))
        if job.world.rank == 1:
            if how == "closes":
                world.close()
            raise KeyError("this worker fails")
        go(job, model, optimizer, range(2, 6))
        job.finish()
    return copied(model)


@pairwise(transport=BY_MESSAGES, how=["raises", "closes", "ends"], rule=[BSP(), SSP(1), Async()])
def test_others_go_on_when_a_worker_is_lost(
    transport: str, how: str, rule: Consistency, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = ParameterServer(rule, servers=2, overlap=False, bucket_bytes=10_000)
    found = run_threads(lose_worker_1, strategy, how, size=5, transport=transport)
    assert isinstance(found[1], KeyError)
    for rank in (0, 2):
        assert isinstance(found[rank], list), found[rank]
        same(found[rank], found[0])
    (said,) = [record.getMessage() for record in caplog.records if "left at clock" in record.getMessage()]
    # Where nobody waited for its last update, that may be lost with it.
    assert re.match(r"rank 3: worker 1 left at clock {}, and 2 go on: ".format("[12]" if rule == SSP(1) else "2"), said)


# Malformed messages


def send(exchange: Any, head: Tensor, payload: Tensor | None = None) -> None:
    """Send to the first server what `exchange` would not."""

    def steps() -> Any:
        server = exchange._shards[0].server
        sending = [exchange._channel.isend(head, server, REQUEST_TAG)]
        if payload is not None:
            sending.append(exchange._channel.isend(payload, server, PAYLOAD_TAG))
        yield from sending

    exchange._channel.spawn(steps()).wait()


def garbage(size: int) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


MALFORMED: dict[str, tuple[dict[str, Any], int | None]] = {
    "short": ({"num_bytes": -8}, -8),
    "shorter than announced": ({}, -8),
    "long": ({"num_bytes": 8}, 8),
    "huge": ({"num_bytes": 2**60}, None),
    "less than nothing": ({"num_bytes": -(2**40)}, None),
    "unknown shard": ({"shard": 999}, 0),
    "negative shard": ({"shard": -1}, 0),
    "not a number": ({"weight": float("nan")}, 0),
    "negative weight": ({"weight": -1.0}, 0),
    "from the future": ({"base_version": 10**6}, 0),
}
"""Wrong fields of a header, and how much longer than a shard the payload is. `num_bytes` is relative to the shard's."""


def malformed(exchange: Any, what: str) -> None:
    worker_shard = exchange._shards[0]
    shard, config = worker_shard.spec, exchange._config
    requests = config.request_format
    options, flags = exchange._options_reader.read(), np.ones(len(shard.segments), bool)
    good = RequestHeader(RequestKind.PUSH, shard.index, worker_shard.version, NO_PULL, shard.num_bytes)
    if what == "garbage header":
        send(exchange, garbage(requests.num_bytes))
    elif what == "short header":
        send(exchange, garbage(requests.num_bytes - 3))
    elif what == "empty":
        send(exchange, requests.pack(replace(good, num_bytes=0), options, flags))
    elif what == "corrupted":
        packet = garbage(config.codec.packet_bytes(shard.numel, shard.groups))
        send(exchange, requests.pack(replace(good, num_bytes=packet.numel()), options, flags), packet)
    else:
        changes, longer = MALFORMED[what]
        bad = replace(good, **{**changes, "num_bytes": shard.num_bytes + changes.get("num_bytes", 0)})
        payload = None if longer is None else garbage(shard.num_bytes + longer)
        send(exchange, requests.pack(bad, options, flags), payload)


def train_with_a_malformed_push(
    world: World, strategy: ParameterServer, what: str, dropped: threading.Event
) -> list[Tensor]:
    model, optimizer, job = start(world, strategy)
    go(job, model, optimizer, range(2))
    if job.world.rank == 1:
        if what == "leaves":
            job._exchange.leave()
            return []
        malformed(job._exchange, what)
        try:
            go(job, model, optimizer, range(2, 5))
        finally:
            dropped.set()
        return []
    go(job, model, optimizer, range(2, 5))
    if world.transport.cluster is None:
        dropped.wait(20)  # When they have finished, servers leave, whoever has not heard from them yet.
    job.finish()
    return copied(model)


@pytest.mark.parametrize("transport", ["simulated", "sockets"])
@pytest.mark.parametrize("what", [*MALFORMED, "garbage header", "short header", "empty"])
def test_malformed_updates_change_nothing(transport: str, what: str, caplog: pytest.LogCaptureFixture) -> None:
    strategy = ParameterServer(servers=1)
    expected = run_ok(
        train_with_a_malformed_push, strategy, "leaves", threading.Event(), size=4, transport="simulated"
    )[0]
    caplog.clear()
    found = run_threads(train_with_a_malformed_push, strategy, what, threading.Event(), size=4, transport=transport)
    assert isinstance(found[1], WorkerDropped), found[1]
    assert "rank 1: the server on rank 3" in str(found[1])
    for rank in (0, 2):
        assert isinstance(found[rank], list), found[rank]
        same(found[rank], expected)
    (said,) = [record.getMessage() for record in caplog.records if "left at clock" in record.getMessage()]
    assert said.startswith("rank 3: worker 1 left at clock 2, and 2 go on: it was dropped, having sent")


@pytest.mark.parametrize("transport", ["simulated", "sockets"])
@pytest.mark.parametrize("codec", [ErrorFeedback(OneBit()), ErrorFeedback(TopK(0.1))], ids=str)
def test_corrupted_packets_change_nothing(transport: str, codec: Codec, caplog: pytest.LogCaptureFixture) -> None:
    strategy = ParameterServer(servers=1, codec=codec)
    found = run_threads(
        train_with_a_malformed_push, strategy, "corrupted", threading.Event(), size=4, transport=transport
    )
    assert isinstance(found[1], WorkerDropped), found[1]
    same(found[0], found[2])
    assert all(each.isfinite().all() for each in found[0])
    (said,) = [record.getMessage() for record in caplog.records if "left at clock" in record.getMessage()]
    assert "worker 1 left at clock 2" in said


def train_to_a_nan_loss(world: World, strategy: ParameterServer) -> None:
    model, optimizer, job = start(world, strategy)
    job.expect(same_batches=True)
    for step in range(200):
        loss = loss_of(model, whole_batch(step))
        if job.world.rank == 1 and step == 2:
            loss = loss * float("nan")
        job.watch(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    job.finish()


def check_stopped(found: list[Any]) -> None:
    for rank, each in enumerate(found):
        assert isinstance(each, NonFiniteLoss), each
        assert "the loss on rank 1 is NaN or infinite" in str(each)
        assert str(each).startswith(f"rank {rank}: ")


@pairwise(transport=BY_MESSAGES, servers=[1, 2], rule=[BSP(), SSP(2), SoftSync(1), Async()])
def test_a_non_finite_loss_stops_all_workers(transport: str, servers: Any, rule: Consistency) -> None:
    strategy = ParameterServer(rule, servers=servers)
    check_stopped(run_threads(train_to_a_nan_loss, strategy, size=size_of(strategy, 3), transport=transport)[:3])


@everywhere
@pytest.mark.parametrize("rule", [BSP(), SSP(2), Async()], ids=str)
def test_a_non_finite_loss_stops_colocated_servers(transport: str, rule: Consistency) -> None:
    """Whoever stops first takes its server along, which others may notice before they hear why."""
    found = run_threads(train_to_a_nan_loss, ParameterServer(rule), size=3, transport=transport)
    assert isinstance(found[1], NonFiniteLoss), found[1]
    for each in found:
        assert isinstance(each, NonFiniteLoss | RankLost), each


def test_colocated_workers_learn_which_rank_stopped() -> None:
    check_stopped(run_threads(train_to_a_nan_loss, ParameterServer(), size=3, transport="simulated"))


# Invalid arguments


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: SSP(-1), ("got -1", "0 or more", "SSP(0)", "ps:async")),
        (lambda: SoftSync(0), ("got 0", "1 or more", "Async()")),
        (lambda: SoftSync(-3), ("got -3", "1 or more")),
        (lambda: StalenessAware(StalenessAware(BSP())), ("StalenessAware(", "BSP, SSP, SoftSync or Async")),
        (lambda: StalenessAware("bsp"), ("'bsp'", "BSP, SSP, SoftSync or Async")),  # type: ignore[arg-type]
        (lambda: ParameterServer("ssp"), ("got 'ssp'", "SSP(3)")),  # type: ignore[arg-type]
        (lambda: ParameterServer(servers=0), ("got 0", "'colocated'", "1 or more")),
        (lambda: ParameterServer(servers="two"), ("got 'two'", "'colocated'", "1 or more")),  # type: ignore[arg-type]
        (lambda: ParameterServer(codec=LowRank(2)), ("LowRank", "AllReduce")),
        (lambda: ParameterServer(codec=ErrorFeedback(LowRank(2))), ("LowRank", "AllReduce")),
        (lambda: ParameterServer(codec=TopK(0.1, momentum=0.5)), ("TopK", "ErrorFeedback(...)")),
        (lambda: ParameterServer(codec="onebit"), ("got 'onebit'", "ErrorFeedback(OneBit())")),  # type: ignore[arg-type]
        (lambda: ParameterServer(clip=0.0), ("got 0.0", "above 0")),
        (lambda: ParameterServer(bucket_bytes=0), ("got 0", "1 or more")),
        (lambda: ParameterServer(copies=0), ("copies must be 1, or 2", "got 0")),
        (lambda: ParameterServer(copies=3, servers=4), ("copies must be 1, or 2", "got 3", "more are not supported")),
        (lambda: ParameterServer(copies=True), ("copies must be 1, or 2", "got True")),
        (lambda: ParameterServer(copies=2, servers=1), ("copies=2 needs 2 servers or more", "got servers=1")),
    ],
)
def test_invalid_strategies_are_refused(make: Callable[[], Any], says: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        make()
    for part in says:
        assert part in str(refused.value)


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(ConfigError, match=r"servers must.*clip must.*bucket_bytes must"):
        ParameterServer(servers=0, clip=-1.0, bucket_bytes=-1)


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        (ParameterServer(servers=4), ("4 dedicated servers", "world of 4", "Use 3 or fewer")),
        (ParameterServer(servers=7), ("7 dedicated servers", "world of 4", "Use 3 or fewer")),
        (ParameterServer(SoftSync(5)), ("SoftSync(5)", "there are 4", "SoftSync(4)")),
        (ParameterServer(SoftSync(4), servers=1), ("SoftSync(4)", "there are 3", "SoftSync(3)")),
    ],
    ids=str,
)
def test_worlds_that_are_too_small(strategy: ParameterServer, says: tuple[str, ...]) -> None:
    for each in run_threads(start, strategy, size=4, transport="sockets"):
        assert isinstance(each, ConfigError), each
        for part in says:
            assert part in str(each)


def test_copies_need_a_second_server() -> None:
    (each,) = run_threads(start, ParameterServer(copies=2), size=1, transport="sockets")
    assert isinstance(each, ConfigError)
    assert "copies=2 needs 2 servers or more, and a world of 1 rank has one" in str(each)


def test_a_dedicated_server_alone() -> None:
    (each,) = run_threads(start, ParameterServer(servers=1), size=1, transport="sockets")
    assert isinstance(each, ConfigError)
    assert "needs a second rank to train" in str(each)


def test_optimisers_that_servers_cannot_run() -> None:
    def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters())

    for each in run_threads(start, ParameterServer(), lbfgs, size=2, transport="sockets"):
        assert isinstance(each, ConfigError)
        assert "LBFGS" in str(each)
        assert "Use SGD" in str(each)

    class OfTheUser(torch.optim.SGD):
        """Not known to call a closure only once."""

    def closure(world: World) -> None:
        model, optimizer, _ = start(world, ParameterServer(), lambda model: OfTheUser(model.parameters(), lr=0.1))
        loss_of(model, whole_batch(0)).backward()
        optimizer.step(lambda: 0.0)

    for each in run_threads(closure, size=2, transport="sockets"):
        assert isinstance(each, ConfigError)
        assert "closure" in str(each)


# Texts


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("ps:bsp", ParameterServer()),
        ("ps:ssp=3,servers=1", ParameterServer(SSP(3), servers=1)),
        ("ps:softsync=4", ParameterServer(SoftSync(4))),
        ("ps:async", ParameterServer(Async())),
        ("ps:async,aware+onebit", ParameterServer(StalenessAware(Async()), codec=ErrorFeedback(OneBit()))),
        ("ps:ssp=2,aware,overlap=0", ParameterServer(StalenessAware(SSP(2)), overlap=False)),
        ("ps:bsp,servers=2,clip=0.5", ParameterServer(servers=2, clip=0.5)),
        ("ps:bsp,clip=0.123456789", ParameterServer(clip=0.123456789)),
        ("ps:bsp,bucket_bytes=1000", ParameterServer(bucket_bytes=1000)),
        ("ps:bsp,copies=2", ParameterServer(copies=2)),
        ("ps:ssp=3,servers=2,copies=1", ParameterServer(SSP(3), servers=2, copies=1)),
    ],
)
def test_texts_round_trip(text: str, strategy: ParameterServer) -> None:
    assert parse(text) == strategy
    assert str(strategy) == text
    assert hash(parse(text)) == hash(strategy)


def test_texts_with_defaults() -> None:
    assert parse("ps") == ParameterServer()
    assert parse("ps:aware") == ParameterServer(StalenessAware(BSP()))
    assert parse("ps:servers=1") == ParameterServer(servers=1)
    assert parse("ps:overlap=1") == ParameterServer()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ps:ssp=x", "ssp= takes a whole number, got 'x'"),
        ("ps:ssp", "ssp= takes a whole number, got ''"),
        ("ps:softsync", "softsync= takes a whole number"),
        ("ps:ssp=-1", "got -1"),
        ("ps:softsync=0", "got 0"),
        ("ps:bsp,async", "more than one rule, bsp, async"),
        ("ps:ssp=1,softsync=2", "more than one rule"),
        ("ps:bsp=3", "bsp takes no number"),
        ("ps:async=1", "async takes no number"),
        ("ps:async,aware=2", "aware takes nothing"),
        ("ps:foo=1", "'foo' is none of its options: bsp, ssp=3"),
        ("ps:servers=x", "servers= takes a whole number, got 'x'"),
        ("ps:servers=0", "got 0"),
        ("ps:overlap=2", "overlap= takes 0 or 1, got '2'"),
        ("ps:bsp,copies=two", "copies= takes a whole number, got 'two'"),
        ("ps:bsp,copies=3", "copies must be 1, or 2"),
        ("ps:bsp,servers=1,copies=2", "copies=2 needs 2 servers"),
        ("ps:bsp+lowrank:2", "AllReduce"),
    ],
)
def test_invalid_texts_are_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(text)
    assert says in str(refused.value)


def test_the_representation_is_the_same_in_every_process() -> None:
    """A function's address is not."""
    assert " at 0x" not in repr(ParameterServer(StalenessAware(Async())))
    assert repr(StalenessAware(Async())) != repr(StalenessAware(Async(), own_factor))
    assert "own_factor" in repr(StalenessAware(Async(), own_factor))


def own_factor(staleness: int) -> float:
    return 0.5**staleness


def broken_factor(staleness: int) -> float:
    raise ZeroDivisionError("this factor fails")


@everywhere
def test_a_failure_of_a_server_is_reported(transport: str, caplog: pytest.LogCaptureFixture) -> None:
    strategy = ParameterServer(StalenessAware(Async(), broken_factor), servers=1)
    found = run_threads(trained, strategy, size=3, transport=transport)
    assert all(isinstance(each, RankLost) and "rank 2 is gone" in str(each) for each in found[:2]), found
    assert isinstance(found[2], ZeroDivisionError), found[2]
    assert "rank 2: the server here has failed: ZeroDivisionError: this factor fails" in caplog.text


def test_reads_are_recorded_as_events() -> None:
    def train(world: World) -> list[tuple[int, ...]]:
        model, optimizer, job = start(world, ParameterServer())
        go(job, model, optimizer, range(3))
        reads = [event.about for event in job.events if event.kind == READ and event.about[0] == 0]
        assert job.metrics.strategy["staleness"] == {0: 3}
        job.finish()
        return reads

    for reads in run_ok(train, size=2, transport="sockets"):
        assert reads == [(0, 0, 0), (0, 1, 1), (0, 2, 2)]


# Known limitations


def train_slowly(world: World, strategy: ParameterServer) -> list[Tensor]:
    """One worker is done long before the others, who need longer than a wait may last."""
    model, optimizer, job = start(world, strategy)
    for step in range(2 if job.world.rank == 0 else 12):
        if job.world.rank:
            threading.Event().wait(0.2)
        go(job, model, optimizer, range(step, step + 1))
    job.finish()
    return copied(model)


@pytest.mark.parametrize("servers", ["colocated", 1])
def test_training_may_last_longer_than_a_wait(servers: Any) -> None:
    strategy = ParameterServer(Async(), servers=servers)
    size = size_of(strategy, 2)
    found = run_threads(train_slowly, strategy, size=size, transport="sockets", timeout=timedelta(seconds=1.5))
    assert not any(isinstance(each, Exception) for each in found), found


def test_joining_while_servers_clip() -> None:
    """Servers wait for each other's norms of a clock for which a worker sends to one now, to the other later."""

    def train(away_s: float) -> None:
        world = tutti.init()
        strategy = ParameterServer(servers=2, clip=0.1, bucket_bytes=3000)
        model, optimizer, job = start(world, strategy)
        go(job, model, optimizer, range(2))
        if job.world.rank == 1:
            with job.away():
                world.transport.elapse(away_s)
        go(job, model, optimizer, range(2, 8))
        job.finish()

    cluster = Cluster(link=Link("100mbit", "300us"), compute=Compute(sample_s=1e-4))
    for number in range(20):
        tutti.simulate(train, 0.003 + 0.0002 * number, workers=4, cluster=cluster)
