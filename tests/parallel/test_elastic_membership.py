"""`job.on_membership`: functions of the user's that are called when the workers of an elastic run have changed."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import tutti
from tutti.errors import ConfigError
from tutti.job import MembershipChange
from tutti.launch.elastic_run import ElasticRun

VICTIM, EVENT, END = 1, 4, 12
WAIT_S = 30.0

Listener = Callable[["tutti.Job", MembershipChange], None]
Told = tuple[int, tuple[int, ...], tuple[int, ...], int, int, bool]


def train(listener: Listener, strategy: str, *, wait_for_another: bool = True) -> list[Told]:
    """Train, lose a worker before a step, and go on when another has joined; return what this one was told."""
    torch.set_num_threads(1)
    world = tutti.init()
    elastic: Any = world.elastic
    number = int(os.environ["RANK"])
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = tutti.distribute(model, optimizer, strategy)
    batches = tutti.shard(DataLoader(TensorDataset(torch.randn(END * 12, 4)), batch_size=4))
    told: list[Told] = []
    in_step = False

    def changed(change: MembershipChange) -> None:
        told.append((change.generation, change.lost, change.joined, world.rank, world.size, in_step))
        listener(job, change)

    job.on_membership(changed)
    for epoch in batches.epochs(1):
        for (x,) in epoch:
            in_step = True
            if number == VICTIM and job.steps == EVENT:
                os.kill(os.getpid(), signal.SIGKILL)
            if number < 3 and job.steps >= EVENT + 2 and wait_for_another:
                until_another_worker_waits(elastic.member)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            in_step = False
    job.finish()
    assert job.steps >= END
    return told


def until_another_worker_waits(member: Any) -> None:
    """In the generation that has lost one, and in the next one; ended by the coordinator."""
    deadline = time.monotonic() + WAIT_S
    while member.number < 2 and member.member.known.changes.get(member.name) != member.number:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def nothing(job: "tutti.Job", change: MembershipChange) -> None:
    """Only what `train` does."""


@pytest.mark.parametrize("strategy", ["ring", "bmuf:every=3", "gossip"])
def test_every_worker_is_told_between_two_steps(strategy: str) -> None:
    results = tutti.launch(train, nothing, strategy, workers=(1, 3))
    assert results[0] == [(1, (1,), (), 0, 2, False), (2, (), (3,), 0, 3, False)]
    assert results[1] is None
    assert results[2] == [(1, (1,), (), 1, 2, False), (2, (), (3,), 1, 3, False)]
    assert results[3] == [], "it is not told of its own arrival"


def fails_on_rank_2(job: "tutti.Job", change: MembershipChange) -> None:
    if change.after[job.world.rank] == 2:
        raise RuntimeError("a mistake in the function")


def test_an_error_in_the_function_ends_that_worker(capfd: pytest.CaptureFixture[str]) -> None:
    workers = ElasticRun(minimum=1, maximum=3, restarts=0)
    results = tutti.launch(train_alone, fails_on_rank_2, workers=workers)
    assert [each and [told[:3] for told in each] for each in results] == [[(1, (1,), ()), (2, (2,), ())], None, None]
    assert "a mistake in the function" in capfd.readouterr().err


def train_alone(listener: Listener) -> list[Told]:
    return train(listener, "ring", wait_for_another=False)


def makes_a_collective_call(job: "tutti.Job", change: MembershipChange) -> None:
    for call in (lambda: job.reduce(1.0), job.barrier, lambda: job.checkpoint("nowhere"), job.finish):
        with pytest.raises(ConfigError, match=r"a collective call in a function given to job.on_membership"):
            call()


def test_collective_calls_are_refused_in_the_function() -> None:
    results = tutti.launch(train_alone, makes_a_collective_call, workers=ElasticRun(minimum=1, maximum=3, restarts=0))
    assert [each and len(each) for each in results] == [1, None, 1]


def test_what_is_no_function_is_refused() -> None:
    assert tutti.launch(takes_functions_alone, workers=1) == ["job.on_membership takes a function"]


def takes_functions_alone() -> str:
    tutti.init()
    model = torch.nn.Linear(1, 1)
    with tutti.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1)) as job:
        job.on_membership(lambda change: None)  # Never called, as the workers stay the same.
        with pytest.raises(ConfigError) as refused:
            job.on_membership("a text")  # type: ignore[arg-type]
    return str(refused.value)[: len("job.on_membership takes a function")]
