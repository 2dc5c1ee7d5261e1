"""Elastic launches: lost workers are replaced, workers leave and join, and the result is that of an undisturbed run."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import tutti
from tutti.checkpoint.index import newest_complete
from tutti.errors import ReplicaMismatch, WorkerFailed
from tutti.launch.chaos import Chaos
from tutti.launch.elastic_run import ElasticRun
from tutti.launch.local import supervise

PLACE = 1
"""The rank that something happens to."""
EVENT, GATE, END = 6, 9, 24
"""The step in which it happens, the one before which the others wait for what follows, and the last one."""
WAIT_S = 30.0

Event = Callable[["Rank"], None]


class Rank:
    """This worker, between two steps."""

    def __init__(self) -> None:
        elastic: Any = tutti.world().elastic
        self.member, self.regrouping = elastic.member, elastic.regrouping
        self.number = int(os.environ["RANK"])

    def wait(self, over: Callable[[], bool]) -> None:
        """Wait for another process; ended by it, or by a deadline."""
        deadline = time.monotonic() + WAIT_S
        while not over():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def asked_to_stop(self) -> bool:
        """Whether the others want this generation to end, because a worker waits to join."""
        return self.member.member.known.changes.get(self.member.name) == self.member.number


def train(
    event: Event,
    gate: Event,
    folder: Path | None = None,
    *,
    width: int = 8,
    strategy: str = "ring",
    num_steps: int = END,
) -> tuple[int, int, int, list[float]]:
    """Train for `num_steps` steps; return the size of the world, its generation, void steps and the parameters.

    `event` is called on the rank `PLACE` before the step `EVENT`, and `gate` on all ranks before the step `GATE`.
    """
    world = tutti.init()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(num_steps * 12, 4, dtype=torch.float64))
    model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = tutti.distribute(model, optimizer, strategy)
    batches = tutti.shard(DataLoader(data, batch_size=4, shuffle=True))
    rank = None if world.elastic is None else Rank()
    for epoch in batches.epochs(1):
        for (x,) in epoch:
            if rank is not None and rank.number == PLACE and job.steps == EVENT:
                event(rank)
            if rank is not None and job.steps == GATE:
                gate(rank)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if folder is not None:
                job.checkpoint(folder, batches, every="1h")
    job.finish()
    assert job.steps == num_steps
    number, num_void = (0, 0) if rank is None else (rank.member.number, rank.regrouping.changes.voided_steps)
    return world.size, number, num_void, torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()


def nothing(rank: Rank) -> None:
    """An event that is none."""


def die(rank: Rank) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(rank: Rank) -> None:
    raise RuntimeError("a mistake in the script")


def is_asked_to_leave(rank: Rank) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def until_the_ranks_change(rank: Rank) -> None:
    """Nobody comes to the end before."""
    rank.wait(lambda: rank.member.number > 0 or rank.asked_to_stop())


def until_a_new_worker_joins(rank: Rank) -> None:
    """Those that were there wait, so that the training does not end before."""
    if rank.number < 3:
        rank.wait(lambda: rank.member.number > 0 and rank.asked_to_stop())


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    return tutti.launch(train, nothing, nothing, workers=3)[0][-1]


def assert_same(results: list[Any], undisturbed: list[float]) -> None:
    """All that came to the end have the same parameters, which are those of a run in which nothing happened."""
    assert any(results)
    for each in filter(None, results):
        assert each[-1] == pytest.approx(undisturbed, rel=0, abs=1e-12)


@pytest.mark.parametrize("event", [die, fail])
def test_a_lost_worker_is_replaced(event: Event, undisturbed: list[float], capfd: pytest.CaptureFixture[str]) -> None:
    results = tutti.launch(train, event, until_a_new_worker_joins, workers=(1, 3))
    assert [each and each[:2] for each in results] == [(3, 2), None, (3, 2), (3, 2)]
    assert_same(results, undisturbed)
    err = capfd.readouterr().err
    assert re.search(r"\[rank 1\] .*: the others go on without it; another worker takes its place in 0.5 s", err)
    assert ("a mistake in the script" in err) == (event is fail)


def test_without_restarts_the_others_finish_alone(undisturbed: list[float]) -> None:
    results = tutti.launch(train, die, nothing, workers=ElasticRun(minimum=1, maximum=3, restarts=0))
    assert [each and each[:2] for each in results] == [(2, 1), None, (2, 1)]
    assert_same(results, undisturbed)


def test_sigterm_lets_a_worker_leave_between_two_steps(
    undisturbed: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    results = tutti.launch(train, is_asked_to_leave, until_the_ranks_change, workers="1:3")
    assert [each and each[:3] for each in results] == [(2, 1, 0), None, (2, 1, 0)], "nothing was void"
    assert_same(results, undisturbed)
    err = capfd.readouterr().err
    assert "tutti: rank 1 has left the run" in err
    assert "go on without it" not in err


def train_without_end(folder: Path) -> None:
    train(nothing, is_asked_to_leave, folder, num_steps=100_000)


def test_if_all_leave_they_save_the_state(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed) as failed:
        tutti.launch(train_without_end, tmp_path, workers=(1, 3))
    assert failed.value.status == 128 + signal.SIGTERM
    assert newest_complete(tmp_path) is not None


def first_ones_die(rank: Rank) -> None:
    if rank.number < 3:
        die(rank)


def test_after_the_loss_of_all_workers_the_training_begins_anew(undisturbed: list[float]) -> None:
    results = tutti.launch(train, nothing, first_ones_die, workers=(3, 3))
    assert [each is None for each in results[:3]] == [True, True, True]
    assert any(results[3:])
    assert_same(results, undisturbed)


def two_die(rank: Rank) -> None:
    if rank.number > 0:
        die(rank)


def test_too_few_workers_save_the_state_and_end(tmp_path: Path) -> None:
    workers = ElasticRun(minimum=2, maximum=3, restarts=0)
    with pytest.raises(
        WorkerFailed, match=r"TooFewWorkers: rank 0: 1 workers are left, and this run needs 2"
    ) as failed:
        tutti.launch(train, nothing, two_die, tmp_path, workers=workers)
    assert f"The state is saved in {tmp_path}" in str(failed.value)
    assert newest_complete(tmp_path) is not None


def join_otherwise(folder: Path, width: int, strategy: str) -> None:
    """As `train`, where the new worker has another model or strategy, and the others wait for its error."""
    is_new = int(os.environ["RANK"]) >= 3
    error = folder / "error"
    try:
        train(
            die,
            lambda rank: rank.wait(error.exists),
            width=width if is_new else 8,
            strategy=strategy if is_new else "ring",
        )
    except ReplicaMismatch as mismatch:
        error.write_text(str(mismatch))
        raise


@pytest.mark.parametrize(
    ("width", "strategy", "message"),
    [
        (9, "ring", "cannot join the job, whose model is Sequential"),
        (8, "bmuf:every=4", "cannot join the job, whose strategy is"),
    ],
)
def test_a_worker_that_differs_does_not_join(
    width: int, strategy: str, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = supervise(join_otherwise, (tmp_path, width, strategy), ElasticRun(minimum=1, maximum=3), {})
    run.run()
    err = capfd.readouterr().err
    assert message in err
    assert err.count("takes its place") == 1, "the mistake would be the same again"
    assert run.failed_alone is not None
    assert run.failed_alone.rank == 3


def until_chaos_has_struck(rank: Rank) -> None:
    """The rank that chaos kills waits for that, and the others until another worker joins in its place."""
    rank.wait(lambda: rank.number >= 3 or (rank.member.number > 0 and rank.asked_to_stop()) or rank.member.lost() != [])
    if rank.member.number > 0:
        until_a_new_worker_joins(rank)


def test_chaos_kills_and_stops_workers(undisturbed: list[float], capfd: pytest.CaptureFixture[str]) -> None:
    workers = ElasticRun(minimum=1, maximum=3, chaos=Chaos.parse("kill 1 at 10ms; stop 2 for 200ms; seed 3"))
    results = tutti.launch(train, nothing, until_chaos_has_struck, workers=workers)
    assert [each is None for each in results] == [False, True, False, False]
    assert_same(results, undisturbed)
    err = capfd.readouterr().err
    assert "chaos: kill the worker in place 1" in err
    assert "chaos: stop the worker in place 2 for 0.2 s" in err
