"""`job.reduce`, `job.gather` and `job.barrier`: the same answer or the same error on all ranks, and never a hang."""

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

import tutti
from support import run_ok, run_threads
from tutti.errors import ConfigError, DeadlineExceeded, Deadlock, RankLost, ReplicaMismatch
from tutti.job import Job, distribute
from tutti.world import World, set_world

STRATEGIES = ("native", "bmuf:every=4", "gossip", "peers", "ps:bsp", "ps:ssp=3", "ps:async", "ps:async,servers=1")
KINDS = ("sockets", "shared_memory", "hosts", "simulated")

pytestmark = pytest.mark.parametrize("transport", KINDS)


def job_of(world: World, strategy: str = "native") -> Job:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, world=world)


def train(job: Job, steps: int) -> None:
    model = job._model
    optimizer = job._replica.optimizer
    for _ in range(steps):
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(world: World) -> Any:
    with job_of(world) as job:
        rank = world.rank
        table = {"loss": rank + 0.5, "count": rank, "vector": torch.tensor([rank, -rank], dtype=torch.float32)}
        results = [job.reduce(table, op) for op in ("mean", "sum", "max")]
        job.barrier()
        gathered = job.gather({"rank": rank, "items": [1, None, "text", (2, 3)], "tensor": torch.full((2,), rank)})
        return *results, gathered, job.reduce(True), job.reduce(torch.tensor(rank), "sum")


def test_reduce_and_gather_give_the_same_on_all_ranks(transport: str) -> None:
    for mean, total, largest, gathered, one, number in run_ok(values, size=3, transport=transport):
        assert (mean["loss"], mean["count"], mean["vector"].tolist()) == (1.5, 1.0, [1.0, -1.0])
        assert (total["loss"], total["count"], total["vector"].tolist()) == (4.5, 3, [3.0, -3.0])
        assert (largest["loss"], largest["count"], largest["vector"].tolist()) == (2.5, 2, [2.0, 0.0])
        assert mean["vector"].dtype == torch.float32
        assert [entry["rank"] for entry in gathered] == [0, 1, 2]
        assert gathered[2]["items"] == [1, None, "text", (2, 3)]
        assert torch.equal(gathered[2]["tensor"], torch.full((2,), 2))
        assert one == 1.0
        assert number.dtype == torch.int64
        assert number.item() == 3


def large(world: World) -> list[list[int]]:
    """In shared memory neither the values of a call nor their answer, or only the answer, have room in a page."""
    with job_of(world) as job:
        found = []
        for numel in (10, 20_000, 10, 100_000, 10):
            gathered = job.gather(torch.full((numel,), world.rank, dtype=torch.float32))
            found.append([int(tensor.sum() / numel) for tensor in gathered])
        return found


def test_values_of_any_size(transport: str) -> None:
    assert run_ok(large, size=3, transport=transport) == [[[0, 1, 2]] * 5] * 3


def test_a_value_that_was_sent_is_a_copy(transport: str) -> None:
    def change(world: World) -> float:
        with job_of(world) as job:
            value = torch.ones(3)
            gathered = job.gather(value)
            value.zero_()
            job.barrier()
            job.gather(torch.full((50,), 7.0))  # Into the same memory, if there is any.
            job.gather(torch.full((50,), 7.0))
            return float(sum(tensor.sum() for tensor in gathered))

    assert run_ok(change, size=2, transport=transport) == [6.0, 6.0]


def under(world: World, strategy: str) -> float:
    with job_of(world, strategy) as job:
        train(job, 2 + job.world.rank if strategy.startswith("ps:async") else 2)
        first = job.reduce(job.world.rank + 1)
        with job.consensus():
            inside = job.reduce(job.world.rank + 1)
        assert first == inside
    return job.reduce(job.world.rank + 1)  # Also after the end: every rank evaluates a part, say.


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_reduce_works_under_every_strategy(transport: str, strategy: str) -> None:
    by_rank = run_ok(under, strategy, size=3, transport=transport)
    assert by_rank == ([1.5, 1.5, None] if "servers=1" in strategy else [2.0, 2.0, 2.0])


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "operation": (lambda job, rank: job.reduce(1.0, "median"), ConfigError, "mean, sum, max"),
    "operations": (lambda job, rank: job.reduce(1.0, "sum" if rank else "max"), ReplicaMismatch, "rank 1"),
    "text": (lambda job, rank: job.reduce("x" if rank == 1 else 1.0), ConfigError, "rank 1: .*a str"),
    "inside": (lambda job, rank: job.reduce({"loss": None if rank == 1 else 1.0}), ConfigError, "'loss'"),
    "keys": (lambda job, rank: job.reduce({"a": 1.0} | ({"b": 2.0} if rank == 1 else {})), ReplicaMismatch, "'b'"),
    "shapes": (lambda job, rank: job.reduce(torch.zeros(2 + rank)), ReplicaMismatch, r"\(2,\).*\(3,\)"),
    "dtypes": (
        lambda job, rank: job.reduce(torch.zeros(2, dtype=torch.float64 if rank else torch.float32)),
        ReplicaMismatch,
        "float32.*float64",
    ),
    "integers": (lambda job, rank: job.reduce(torch.zeros(2, dtype=torch.int64)), ConfigError, "int64"),
    "object": (lambda job, rank: job.gather(object() if rank == 1 else 1), ConfigError, "rank 1: .*object"),
    "calls": (lambda job, rank: job.barrier() if rank == 1 else job.reduce(1), ReplicaMismatch, "job.barrier"),
}
"""What each rank calls, the error on every rank, and what it says."""


def wrong(world: World, name: str) -> float:
    job = job_of(world)
    call, kind, words = WRONG[name]
    with pytest.raises(kind, match=words):
        call(job, world.rank)
    result = job.reduce(1.0)  # Nothing is out of step afterwards.
    job.finish()
    return float(result)


@pytest.mark.parametrize("name", WRONG)
def test_bad_values_are_the_same_error_on_all_ranks(transport: str, name: str) -> None:
    assert run_ok(wrong, name, size=2, transport=transport) == [1.0, 1.0]


def missing(world: World, absent: int) -> None:
    job = job_of(world)
    if world.rank == absent:
        with pytest.raises((RankLost, DeadlineExceeded)):
            # It is alive, and does not call.
            world.transport.irecv(torch.zeros(1), (absent + 1) % world.size).wait()
        return
    job.reduce(1.0)


@pytest.mark.parametrize("absent", [0, 2])
def test_a_call_by_some_ranks_only_is_an_error_that_names_the_others(transport: str, absent: int) -> None:
    limit = timedelta(seconds=1.5)
    if transport == "simulated":  # There nobody has to wait to see it.
        with pytest.raises(Deadlock, match=rf"rank {(absent + 1) % 3} .* a message from rank {absent} .*calls"):
            run_threads(missing, absent, size=3, transport=transport)
        return
    results = run_threads(missing, absent, size=3, transport=transport, timeout=limit)
    errors = [error for rank, error in enumerate(results) if rank != absent]
    assert all(isinstance(error, RankLost | DeadlineExceeded) for error in errors), results
    assert all(f"rank {absent}" in str(error) for error in errors), errors


def lose(world: World, strategy: str, lost: int) -> Any:
    job = job_of(world, strategy)
    before = job.gather(world.rank)
    if world.rank == lost:
        return None  # Its world is closed behind it.
    return before, job.gather(world.rank), job.reduce(world.rank + 1.0)


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("strategy", ["gossip", "ps:async"])
def test_a_lost_rank_is_left_out_where_the_others_continue(transport: str, strategy: str, lost: int) -> None:
    if strategy == "ps:async" and transport != "shared_memory":
        strategy = "peers"  # Elsewhere a server is lost with the rank, and with it the run.
    results = run_threads(lose, strategy, lost, size=3, transport=transport)
    left = [rank for rank in range(3) if rank != lost]
    gathered = [None if rank == lost else rank for rank in range(3)]  # An index is a rank, whoever is lost.
    for rank in left:
        assert results[rank] == ([0, 1, 2], gathered, sum(left) / 2 + 1), results


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_rank_is_an_error_where_every_rank_is_needed(transport: str, lost: int) -> None:
    results = run_threads(lose, "native", lost, size=3, transport=transport)
    for rank in {0, 1, 2} - {lost}:
        assert isinstance(results[rank], RankLost), results
        assert f"rank {lost}" in str(results[rank])


def printing(world: World) -> None:
    set_world(world)
    try:
        tutti.print("rank", world.rank, sep="=", end=";\n")
    finally:
        set_world(None)


def test_print_prints_on_the_first_rank(transport: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_ok(printing if transport != "simulated" else lambda world: tutti.print("rank=0;"), size=3, transport=transport)
    assert capsys.readouterr().out == "rank=0;\n"
    tutti.print("alone")
    assert capsys.readouterr().out == "alone\n"
