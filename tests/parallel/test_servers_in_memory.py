"""Parameter servers in shared memory, where the worker that completes a version makes it, and Hogwild."""

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support import run_ok, run_threads
from tutti.errors import NonFiniteLoss
from tutti.events import APPLY, READ
from tutti.job import Job, distribute
from tutti.strategies import BSP, SSP, Async, ParameterServer, SoftSync, StalenessAware
from tutti.world import World

_drawing = threading.Lock()  # Ranks that are threads share torch's generator.

LOCKED = [BSP(), SSP(2), SoftSync(2), Async(locks=True), StalenessAware(SSP(1))]
RULES = [*LOCKED, Async(), StalenessAware(Async())]


def start(world: World, strategy: ParameterServer) -> tuple[nn.Module, torch.optim.Optimizer, Job]:
    with _drawing, torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, distribute(model, optimizer, strategy, world=world)


def go(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        x = torch.randn(8, 6, generator=generator)
        F.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
        optimizer.step()
        optimizer.zero_grad()


def copied(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in [*model.parameters(), *model.buffers()] if p.is_floating_point()]


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def logs(job: Job, kind: str) -> list[tuple[int, ...]]:
    return [event.about for event in job.events if event.kind == kind]


def train(world: World, strategy: ParameterServer, steps: list[int]) -> dict[str, Any]:
    model, optimizer, job = start(world, strategy)
    go(model, optimizer, world.rank, steps[world.rank])
    job.finish()
    found = {"reads": logs(job, READ), "applied": logs(job, APPLY), "metrics": job.metrics}
    go(model, optimizer, 0, 1)  # The model has memory of its own again, and its optimiser works.
    return {**found, "model": copied(model)}


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_all_end_with_the_same_and_no_update_is_lost(rule: Any) -> None:
    steps = [12, 9, 12]  # One is done before the others.
    found = run_ok(train, ParameterServer(rule, bucket_bytes=200), steps, size=3, transport="shared_memory")
    applied = [(shard, worker, clock) for each in found for shard, _, worker, clock in each["applied"]]
    assert len(applied) == len(set(applied))
    shards = {shard for shard, _, _ in applied}
    for worker, count in enumerate(steps):
        for shard in shards:
            assert sum(key[:2] == (shard, worker) for key in applied) == count


@pytest.mark.parametrize("rule", [BSP(), SSP(1), SSP(3)], ids=str)
def test_reads_contain_all_updates_within_the_bound(rule: Any) -> None:
    found = run_ok(train, ParameterServer(rule, bucket_bytes=200), [15] * 4, size=4, transport="shared_memory")
    made = {(shard, w, clock): version for each in found for shard, version, w, clock in each["applied"]}
    reads = [read for each in found for read in each["reads"]]
    assert reads
    for shard, clock, version in reads:
        for worker in range(4):
            for earlier in range(clock - rule.bound):
                assert made[shard, worker, earlier] < version
    assert max(max(each["metrics"].strategy["staleness"]) for each in found) <= rule.bound


@pytest.mark.parametrize("rule", [SoftSync(2), Async(locks=True), Async()], ids=str)
def test_reads_contain_all_updates_of_the_reader(rule: Any) -> None:
    found = run_ok(train, ParameterServer(rule, bucket_bytes=200), [15] * 3, size=3, transport="shared_memory")
    made = {(shard, w, clock): version for each in found for shard, version, w, clock in each["applied"]}
    for worker, each in enumerate(found):
        for shard, clock, version in each["reads"]:
            assert all(made[shard, worker, earlier] < version for earlier in range(clock))


def test_hogwild_shares_the_optimisers_state() -> None:
    def work(world: World) -> Any:
        model, optimizer, job = start(world, ParameterServer(Async()))
        go(model, optimizer, world.rank, 10)
        state = job.state_dict()["exchange"]["optimizer"]
        job.finish()
        return copied(model), {name: float(each["step"]) for name, each in state.items()}

    found = run_ok(work, size=3, transport="shared_memory")
    assert all(same(found[0][0], model) for model, _ in found)
    # Of three that count at once one or two counts may be lost: what is lost is little.
    assert all(20 <= count <= 30 for _, counts in found for count in counts.values()), found[0][1]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_consensus_leave_join_and_checkpoints(rule: Any) -> None:
    def work(world: World) -> Any:
        model, optimizer, job = start(world, ParameterServer(rule))
        go(model, optimizer, world.rank, 5)
        with job.consensus():
            agreed = copied(model)
        if world.rank == 0:
            with job.away():
                pass
        go(model, optimizer, world.rank, 3)
        state = job.state_dict()
        with job.consensus():
            saved = copied(model)
        go(model, optimizer, world.rank, 2)
        with torch.no_grad():
            floats = [t for t in [*model.parameters(), *model.buffers()] if t.is_floating_point()]
            for tensor, old in zip(floats, saved, strict=True):
                tensor.copy_(old)
        job.load_state_dict(state)
        with job.consensus():
            loaded = copied(model)
        go(model, optimizer, world.rank, 2)
        job.finish()
        return agreed, saved, loaded, copied(model)

    found = run_ok(work, size=3, transport="shared_memory")
    for agreed, saved, loaded, last in found:
        assert same(agreed, found[0][0])
        assert same(loaded, saved)
        assert same(last, found[0][3])


@pytest.mark.parametrize("rule", [BSP(), SSP(2), SoftSync(2)], ids=str)
def test_joining_takes_no_step_unclipped(rule: Any) -> None:
    """A worker that joins finds due steps of shards that are stepped jointly."""

    def work(world: World) -> float:
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        job = distribute(model, optimizer, ParameterServer(rule, clip=1e-3, bucket_bytes=100), world=world)
        before = torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
        for _ in range(10):
            go(model, optimizer, world.rank, 1)
            with job.away():
                pass
        job.finish()
        return float((torch.cat([p.detach().flatten() for p in model.parameters()]) - before).norm())

    # 30 updates, each of which may move the model by 1e-3 at most, but for rounding.
    assert all(moved <= 0.0301 for moved in run_ok(work, size=3, transport="shared_memory"))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_others_go_on_without_one_that_fails(rule: Any, caplog: pytest.LogCaptureFixture) -> None:
    def work(world: World) -> Any:
        model, optimizer, job = start(world, ParameterServer(rule, bucket_bytes=200))
        with job:
            go(model, optimizer, world.rank, 4)
            if world.rank == 1:
                raise KeyError("on purpose")
            go(model, optimizer, world.rank, 8)
        return copied(model)

    found = run_threads(work, size=3, transport="shared_memory")
    assert isinstance(found[1], KeyError)
    assert same(found[0], found[2])
    assert "worker 1 left at clock 4" in caplog.text


@pytest.mark.parametrize("rule", [BSP(), SoftSync(2), Async()], ids=str)
def test_a_loss_that_is_not_finite_stops_all(rule: Any) -> None:
    def work(world: World) -> None:
        model, optimizer, job = start(world, ParameterServer(rule))
        with job:
            for step in range(200):
                loss = model(torch.randn(4, 6)).mean()
                job.watch(loss * float("nan") if world.rank == 1 and step == 5 else loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    found = run_threads(work, size=3, transport="shared_memory")
    assert all(isinstance(each, NonFiniteLoss) for each in found), found
