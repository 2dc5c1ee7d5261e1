"""A synchronous start in elastic runs: workers are lost and join in either part, and the run ends where it would have.

After the start, the strategies here take exact steps as well, by another exchange than in the start. So every run can
be compared with one that is not disturbed.
"""

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import tutti
from tutti.launch.elastic_run import ElasticRun

NUM_STEPS = 24
WAIT_S = 30.0


def train(strategy: str, start: int, lost_at: int, replaced: bool) -> tuple[int, int, bool, list[float]]:
    """Train with a synchronous start of `start` steps. Rank 1 is killed before the step `lost_at`.

    If it is `replaced`, the others wait before the next step until another worker joins in its place. Returns the
    numbers of the generation and of steps, whether the last exchange is that of the strategy, and the parameters.
    """
    tutti.init()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(NUM_STEPS * 12, 4, dtype=torch.float64))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    job = tutti.distribute(model, optimizer, strategy)
    batches = tutti.shard(DataLoader(data, batch_size=4, shuffle=True))
    job.start_synchronously(start)
    rank = int(os.environ["RANK"])
    for epoch in batches.epochs(1):
        for (x,) in epoch:
            if rank == 1 and job.steps == lost_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if rank < 3 and job.steps == lost_at + 1 and replaced:
                wait_for_a_joiner()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    attached = job._attached == job.strategy
    elastic = tutti.world().elastic
    number = 0 if elastic is None else elastic.member.number
    job.finish()
    return number, job.steps, attached, torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()


def wait_for_a_joiner() -> None:
    """Ended by the coordinator, which has a worker that waits to join, or by a deadline."""
    elastic: Any = tutti.world().elastic
    member = elastic.member
    deadline = time.monotonic() + WAIT_S
    while member.member.known.changes.get(member.name) != member.number:
        assert time.monotonic() < deadline
        time.sleep(0.005)


EXACT = "onebit:exact_below=1000"
"""Compresses larger parameters than these."""


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    return tutti.launch(train, EXACT, 8, 100, False, workers=3)[0][-1]


@pytest.mark.parametrize("strategy", [EXACT, "averaging:every=1"])
def test_the_start_ends_without_a_loss(strategy: str, undisturbed: list[float]) -> None:
    """The ranks form one generation for the start, and another one behind it."""
    results = tutti.launch(train, strategy, 8, 100, False, workers=(3, 3))
    assert [each[:3] for each in results] == [(2, NUM_STEPS, True)] * 3
    for each in results:
        assert each[-1] == pytest.approx(undisturbed, rel=0, abs=1e-12)


@pytest.mark.parametrize("lost_at", [0, 4, 7, 8, 14], ids="before the {}th step".format)
def test_a_worker_is_lost(lost_at: int, undisturbed: list[float]) -> None:
    results = tutti.launch(train, EXACT, 8, lost_at, False, workers=ElasticRun(minimum=1, maximum=3, restarts=0))
    assert results[1] is None
    for each in (results[0], results[2]):
        assert each[1:3] == (NUM_STEPS, True)
        assert each[-1] == pytest.approx(undisturbed, rel=0, abs=1e-12)


@pytest.mark.parametrize("lost_at", [4, 14], ids=["in the start", "behind it"])
def test_a_worker_joins(lost_at: int, undisturbed: list[float]) -> None:
    results = tutti.launch(train, EXACT, 8, lost_at, True, workers=(1, 3))
    assert results[1] is None
    for each in (results[0], results[2], results[3]):
        assert each[1:3] == (NUM_STEPS, True)
        assert each[-1] == pytest.approx(undisturbed, rel=0, abs=1e-12)


@pytest.mark.parametrize("strategy", ["ps:async", "ps:softsync=2", "peers", "diloco:every=5"])
@pytest.mark.parametrize("lost_at", [4, 14], ids=["in the start", "behind it"])
def test_the_others_go_on_under_any_strategy(strategy: str, lost_at: int) -> None:
    """Not as if nothing had happened: what is lost with a worker depends on when."""
    results = tutti.launch(train, strategy, 8, lost_at, False, workers=ElasticRun(minimum=1, maximum=3, restarts=0))
    assert results[1] is None
    assert results[0][2:] == results[2][2:]
    assert results[0][2], "it has come to the end of the start"
