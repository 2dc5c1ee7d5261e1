"""New workers of a run prepare while the others train, and get the state from several of them, which may be lost."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import tutti
from tutti.job.elastic import regrouping
from tutti.launch.chaos import Chaos
from tutti.launch.elastic_run import ElasticRun

WORKERS, VICTIM, EVENT, GATE, END = 3, 1, 6, 9, 24
WAIT_S = 30.0


def until(over: Callable[[], bool]) -> None:
    """Wait for another process; ended by it, or by a deadline."""
    deadline = time.monotonic() + WAIT_S
    while not over():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def train(folder: str, fault: str = "", strategy: str = "ring") -> tuple[int, list[float]]:
    """Lose a worker, and have another take its place; return the number of workers at the end, and the parameters.

    Args:
        fault: who kills itself while the state is sent to the new worker: "first source", "other source" or "taker".
    """
    torch.set_num_threads(1)
    world = tutti.init()
    elastic: Any = world.elastic
    number = int(os.environ["RANK"])
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(END * 12, 4, dtype=torch.float64))
    model = torch.nn.Sequential(torch.nn.Linear(4, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    arrange_fault(fault, number, Path(folder))
    job = tutti.distribute(model, optimizer, strategy)
    steps = Path(folder) / "steps"
    if elastic is not None and elastic.has_joined and not (Path(folder) / "prepared").exists():
        # The others train on while it prepares its data. They wait for it only behind the step of the gate.
        until(lambda: steps.exists() and int(steps.read_text() or 0) >= EVENT + 2)
        assert elastic.member.generation is None
        (Path(folder) / "prepared").touch()
    batches = tutti.shard(DataLoader(data, batch_size=4, shuffle=True))
    for epoch in batches.epochs(1):
        for (x,) in epoch:
            if number == VICTIM and job.steps == EVENT and elastic is not None:
                os.kill(os.getpid(), signal.SIGKILL)
            if number < WORKERS and job.steps >= GATE and elastic is not None:
                until(lambda: elastic.member.number > 1 or is_asked_to_stop(elastic.member))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 0:
                steps.write_text(str(job.steps))
    job.finish()
    return world.size, torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()


def is_asked_to_stop(member: Any) -> bool:
    return bool(member.member.known.changes.get(member.name) == member.number)


def arrange_fault(fault: str, number: int, folder: Path) -> None:
    """Have this process kill itself in the middle of the first transfer, if it is the one of the fault."""
    send, receive = regrouping.send_state, regrouping.receive_state

    def dies() -> bool:
        once = folder / "fault"
        first = not once.exists()
        once.touch()
        return first

    def sends(state: Any, transport: Any, sources: Any, takers: Any) -> None:
        if fault == ("first source" if transport.rank == sources[0] else "other source") and dies():
            os.kill(os.getpid(), signal.SIGKILL)
        send(state, transport, sources, takers)

    def receives(transport: Any, sources: Any) -> Any:
        if fault == "taker" and dies():
            os.kill(os.getpid(), signal.SIGKILL)
        return receive(transport, sources)

    regrouping.send_state, regrouping.receive_state = sends, receives


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return tutti.launch(train, str(tmp_path_factory.mktemp("undisturbed")), workers=WORKERS)[0][1]


@pytest.mark.parametrize("transport", ["shared_memory", "sockets"])
def test_the_others_train_while_a_new_worker_prepares(transport: str, undisturbed: list[float], tmp_path: Path) -> None:
    results = tutti.launch(train, str(tmp_path), workers=(1, WORKERS), transport=transport)
    assert [each and each[0] for each in results] == [3, None, 3, 3]
    for each in filter(None, results):
        assert each[1] == pytest.approx(undisturbed, rel=0, abs=1e-12)


@pytest.mark.parametrize("transport", ["shared_memory", "sockets"])
@pytest.mark.parametrize("fault", ["first source", "other source", "taker"])
def test_a_loss_while_the_state_is_sent(fault: str, transport: str, undisturbed: list[float], tmp_path: Path) -> None:
    workers = ElasticRun(minimum=1, maximum=WORKERS, restarts=1)
    results = tutti.launch(train, str(tmp_path), fault, workers=workers, transport=transport)
    assert (tmp_path / "fault").exists()
    left = [each for each in results if each is not None]
    assert len(left) == 2
    for each in left:
        assert each[1] == pytest.approx(undisturbed, rel=0, abs=1e-12)


def evaluate(shuffle: bool) -> list[tuple[int, list[int]]]:
    """Train, and evaluate at the start, in step 2 and in each one with a new worker; return the samples of each."""
    torch.set_num_threads(1)
    world = tutti.init()
    elastic: Any = world.elastic
    number = int(os.environ["RANK"])
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = tutti.distribute(model, optimizer, "ring")
    batches = tutti.shard(DataLoader(TensorDataset(torch.randn(END * 8, 4)), batch_size=4))
    test = tutti.shard(DataLoader(TensorDataset(torch.arange(31)), batch_size=2, shuffle=shuffle))
    found = []

    def seen() -> list[int]:
        with job.consensus(), torch.no_grad():
            own = [index for (indices,) in test for index in indices.tolist()]
        return sorted(index for each in job.gather(own) for index in each or [])

    seen()
    for epoch in batches.epochs(1):
        for (x,) in epoch:
            if number < 2 and job.steps >= 4:
                until(lambda: elastic.member.number > 0 or is_asked_to_stop(elastic.member))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if job.steps == 2 or world.size == 3:
                found.append((world.size, seen()))
    job.finish()
    return found


@pytest.mark.parametrize("shuffle", [False, True])
def test_workers_evaluate_every_sample_once_after_a_join(shuffle: bool) -> None:
    workers = ElasticRun(minimum=1, maximum=3, start=2, restarts=0, chaos=Chaos.parse("join at 10ms"))
    first, second, third = tutti.launch(evaluate, shuffle, workers=workers)
    everything = list(range(31))
    assert first[0] == (2, everything)
    assert len(first) > 1
    assert all(each == (3, everything) for each in first[1:])
    assert (second, third) == (first, first[1:])
