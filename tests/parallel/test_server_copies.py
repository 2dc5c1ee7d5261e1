"""Copies of shards: they hold the same bits, and what they hold is enough to go on after the loss of any rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tutti
from support import run_ok, run_threads
from tutti.cluster import Cluster, Compute, Jitter, Link
from tutti.codecs import ErrorFeedback, OneBit
from tutti.errors import ConfigError, RankLost, StateLost
from tutti.job import distribute
from tutti.job.elastic.regrouping import end_generation
from tutti.replica import Replica
from tutti.strategies import BSP, SSP, Async, ParameterServer, SoftSync, StalenessAware
from tutti.strategies.base import Exchange
from tutti.strategies.parameter_server.kept_shards import choose, shared_shards
from tutti.strategies.parameter_server.messages.group import _copy_offset
from tutti.strategies.parameter_server.messages.server import Server
from tutti.strategies.parameter_server.step_undo import StepUndo
from tutti.transports import Transport
from tutti.world import World

WORKERS, STEPS = 3, 8
BUCKET_BYTES = 10_000


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(24, 60, bias=False), nn.BatchNorm1d(60), nn.Tanh(), nn.Linear(60, 20)).double()


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 24, generator=generator, dtype=torch.float64)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(world: World, strategy: ParameterServer, make: Any, steps: int = STEPS) -> list[Tensor]:
    model = net()
    optimizer = make(model)
    job = distribute(model, optimizer, strategy, world=world)
    for step in range(steps):
        model(batch(job.world.rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    job.finish()
    return [p.detach().clone() for p in model.parameters()]


@contextmanager
def noted_servers() -> Iterator[list[Server]]:
    found: list[Server] = []
    start = Server.start

    def noted(server: Server) -> None:
        found.append(server)
        start(server)

    with patch.object(Server, "start", noted):
        yield found


@pytest.mark.parametrize("servers", ["colocated", 2])
@pytest.mark.parametrize(
    "options",
    [
        {"consistency": BSP()},
        {"consistency": BSP(), "clip": 0.01},
        {"consistency": SSP(2), "factors": True},
        {"consistency": SSP(2, eager=True), "clip": 0.01},
        {"consistency": SoftSync(2), "bucket_bytes": 2**20},
        {"consistency": StalenessAware(Async())},
        {"consistency": BSP(), "codec": ErrorFeedback(OneBit())},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_copies_hold_the_same_bits(options: dict[str, Any], servers: Any) -> None:
    strategy = ParameterServer(servers=servers, copies=2, **{"bucket_bytes": BUCKET_BYTES, **options})
    size = WORKERS + (0 if servers == "colocated" else servers)
    with noted_servers() as noted:
        found = run_ok(train, strategy, adam, size=size, transport="simulated")[:WORKERS]
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))
    held = {index: shard for server in noted for index, shard in server._shards.items()}
    copies = {index: shard for server in noted if server._copies for index, shard in server._copies.shards.items()}
    assert held.keys() == copies.keys()
    assert len(held) > 1
    for index, shard in held.items():
        copy = copies[index]
        assert shard is not copy
        assert shard.version == copy.version > 0
        assert torch.equal(shard.optimizer.values, copy.optimizer.values)
        for (_, _, one), (_, _, two) in zip(shard.optimizer.copy_states(), copy.optimizer.copy_states(), strict=True):
            assert one.keys() == two.keys()
            assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("transport", ["simulated", "simulated_hosts"])
def test_copies_change_no_result(transport: str) -> None:
    with_copies, without = (
        run_ok(train, ParameterServer(bucket_bytes=BUCKET_BYTES, copies=copies), momentum, size=4, transport=transport)
        for copies in (2, 1)
    )
    assert all(torch.equal(one, two) for one, two in zip(with_copies[0], without[0], strict=True))


# Losses


def lose(strategy: ParameterServer, make: Any) -> tuple[int, dict[str, Any]] | None:
    """Train until a loss; return the number of steps that are over, and what is left here.

    None if a rank was lost before all had distributed their model, which ends a run.
    """
    world, model = tutti.init(), net()
    optimizer = make(model)
    try:
        job = distribute(model, optimizer, strategy)
    except RankLost:
        return None
    try:
        for step in range(STEPS):
            model(batch(world.rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if job._replica.lost is not None:
                break
        else:
            job._exchange.consensus()
    except RankLost:
        pass  # In the consensus; in a step, the replica notes it.
    state = job._exchange.state_after_loss()["served"].value
    end_generation(job)
    return job.steps, state


@contextmanager
def surviving() -> Iterator[None]:
    """Strategies prepare for losses as in an elastic run."""
    attach = ParameterServer.attach

    def attached(self: ParameterServer, replica: Replica, transport: Transport) -> Exchange:
        replica.survives = True
        return attach(self, replica, transport)

    with patch.object(ParameterServer, "attach", attached):
        yield


def undisturbed(make: Any) -> list[tuple[dict[str, Tensor], dict[str, Any]]]:
    """Parameters and states by name after each number of steps, of one process with the means of all workers."""
    model = net()
    optimizer = make(model)
    named = dict(model.named_parameters())

    def now() -> tuple[dict[str, Tensor], dict[str, Any]]:
        states = {
            name: {key: torch.as_tensor(value).clone() for key, value in optimizer.state[p].items()}
            for name, p in named.items()
            if p in optimizer.state
        }
        return {name: p.detach().clone() for name, p in named.items()}, states

    found = [now()]
    for step in range(STEPS):
        for rank in range(WORKERS):
            (model(batch(rank, step)).square().mean() / WORKERS).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(now())
    return found


def check_complete(left: list[tuple[int, dict[str, Any]]], wanted: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    """What survivors would go on from is the state after the last step that is over on one of them."""
    about = [[[each["shard"], each["version"], each["is_copy"]] for each in own["shards"]] for _, own in left]
    chosen = choose(about, max(own["completed"] for _, own in left))
    assert len(chosen) == left[0][1]["num_shards"]
    values: dict[str, Tensor] = {name: torch.full((p.numel(),), torch.nan).double() for name, p in wanted[0].items()}
    for rank, place in chosen.values():
        part = left[rank][1]["shards"][place]
        for name, (start, stop), piece in part["values"]:
            if name in values:  # Others are running statistics.
                values[name][start:stop] = piece
        for name, (start, stop, is_whole), state in part["segments"]:
            assert state.keys() == wanted[1].get(name, {}).keys()
            for key, value in state.items():
                whole = wanted[1][name][key]
                same_size = is_whole or whole.dim() == 0
                torch.testing.assert_close(
                    value.reshape(-1), whole.reshape(-1) if same_size else whole.reshape(-1)[start:stop]
                )
    for name, value in values.items():
        torch.testing.assert_close(value.view_as(wanted[0][name]), wanted[0][name], rtol=1e-10, atol=1e-11)


@settings(max_examples=30)
@given(data=st.data())
def test_a_loss_at_any_time_leaves_a_whole_step(data: st.DataObject) -> None:
    """Any rank, at any time: the values and the optimiser's state of one version of all shards are left."""
    make = data.draw(st.sampled_from([momentum, adam]), "optimiser")
    victim = data.draw(st.integers(0, WORKERS - 1), "victim")
    dies_s = data.draw(st.floats(0.04, 0.2), "when")
    strategy = ParameterServer(
        clip=data.draw(st.sampled_from([None, 1e6]), "clip"),
        copies=2,
        overlap=data.draw(st.booleans(), "overlap"),
        bucket_bytes=data.draw(st.sampled_from([BUCKET_BYTES, 2**20]), "bucket bytes"),
    )
    cluster = Cluster(
        link=Link(
            data.draw(st.sampled_from(["30mbit", "1gbit"]), "rate"), data.draw(st.sampled_from(["5us", "200us"]))
        ),
        compute=Compute(sample_s=1e-3),
        slow=data.draw(st.dictionaries(st.integers(0, WORKERS - 1), st.sampled_from([0.5, 1.5, 4.0])), "slow"),
        jitter=data.draw(st.sampled_from([None, Jitter(0.5)]), "jitter"),
        seed=data.draw(st.integers(0, 1000), "seed"),
        failures={victim: dies_s},
    )
    with surviving():
        results = tutti.simulate(lose, strategy, make, workers=WORKERS, cluster=cluster).results
    left = [result for rank, result in enumerate(results) if rank != victim]
    if None in left:
        return
    for steps, own in left:
        assert steps == own["completed"]
    check_complete(left, undisturbed(make)[max(steps for steps, _ in left)])


def test_what_is_lost_with_its_copy_is_reported() -> None:
    def share(world: World) -> None:
        shards = [{"shard": 0, "version": 3, "is_copy": False}]
        own = {"exact": True, "completed": 3, "num_shards": 2, "shards": shards}
        list(shared_shards(own, world.transport))

    for each in run_threads(share, size=2, transport="simulated"):
        assert isinstance(each, StateLost)
        assert "1 of 2 parts of the model were lost together with their copies" in str(each)
        assert "last checkpoint" in str(each)


# Parts


def test_a_shard_is_taken_before_its_copy_and_at_the_right_version() -> None:
    on_0 = [[0, 4, 0], [0, 3, 0], [1, 4, 1], [1, 3, 1]]
    on_1 = [[1, 3, 0], [1, 2, 0], [0, 3, 1], [0, 2, 1]]
    assert choose([on_0, on_1], 3) == {0: (0, 1), 1: (1, 0)}
    assert choose([on_0, on_1], 4) == {0: (0, 0), 1: (0, 2)}
    assert choose([on_0, on_1], None) == {0: (0, 0), 1: (0, 2)}
    assert choose([on_1], 4) == {}


@pytest.mark.parametrize(
    ("hosts", "offset"), [("ab", 1), ("aabb", 2), ("aaabbb", 3), ("abab", 1), ("aaaa", 1), ("aab", 1), ("abc", 1)]
)
def test_copies_are_on_other_hosts(hosts: str, offset: int) -> None:
    assert _copy_offset(list(hosts)) == offset


def test_a_step_is_undone_from_copies() -> None:
    undo, values = StepUndo(), torch.tensor([1.0, 2.0])
    state: dict[str, Any] = {}
    for step in range(3):
        undo.keep(values, [state])
        before, (kept,) = undo.copies()
        assert before.tolist() == [1.0 + step, 2.0 + step]
        assert kept == ({} if not step else {"step": step, "sum": torch.tensor(float(step))})
        values += 1
        state |= {"step": step + 1, "sum": torch.tensor(step + 1.0)}


def test_a_run_that_cannot_use_copies_refuses_them() -> None:
    for each in run_threads(train, ParameterServer(copies=2), momentum, size=2, transport="sockets"):
        assert isinstance(each, ConfigError)
        assert "ends with its first loss" in str(each)
        assert "--workers MIN:MAX" in str(each)
