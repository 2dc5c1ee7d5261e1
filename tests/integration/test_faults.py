"""Ranks that stop, die or wait for each other, in real processes: who is named, who goes on, and what is left."""

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tutti
from tutti.coordination.description import start_time
from tutti.errors import WorkerFailed
from tutti.launch.supervisor_pipe import SupervisorPipe

WORKERS, VICTIM, STEPS, FAULT_AT = 3, 1, 40, 12
PATIENCE_S = 1.0


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUTTI_PATIENCE", f"{PATIENCE_S:g}s")


def train(strategy: str, fault: str = "none") -> dict[str, Any]:
    """Train a few steps, in which the victim has its fault. Returns what the others saw."""
    torch.set_num_threads(1)
    world = tutti.init()
    torch.manual_seed(world.rank)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = tutti.distribute(model, optimizer, strategy)
    last_s, longest_s = time.monotonic(), 0.0
    for step in range(STEPS):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        longest_s, last_s = max(longest_s, time.monotonic() - last_s), time.monotonic()
        if step == FAULT_AT and world.rank == VICTIM:
            FAULTS[fault](model, world)
    job.finish()
    return {
        "longest_s": longest_s,
        "total": sum(float(p.detach().double().sum()) for p in model.parameters()),
    }


def stop(model: nn.Module, world: tutti.World) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def reduce_alone(model: nn.Module, world: tutti.World) -> None:
    world.transport.all_reduce(torch.ones(1)).wait()  # type: ignore[attr-defined]


FAULTS = {"none": lambda *_: None, "stop": stop, "reduce": reduce_alone}


def said_by(capfd: pytest.CaptureFixture[str]) -> str:
    return capfd.readouterr().err


# --- a stopped rank ---

GOSSIP = ("gossip", "gossip:pairs=async", "peers")


@pytest.mark.parametrize("transport", ["shared_memory", "sockets"])
@pytest.mark.parametrize("strategy", ["native", "ring", "bmuf:every=4"])
def test_a_stopped_rank_ends_a_synchronous_run(
    transport: str, strategy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(WorkerFailed) as failed:
        tutti.launch(train, strategy, "stop", workers=WORKERS, transport=transport)
    assert failed.value.rank == VICTIM
    assert "it is stopped" in str(failed.value)
    said = said_by(capfd)
    for rank in {*range(WORKERS)} - {VICTIM}:
        assert f"[rank {rank}] RankLost: rank {rank}: rank {VICTIM} is gone" in said, said


@pytest.mark.parametrize(
    ("strategy", "transport", "processes"),
    [
        *[(strategy, transport, WORKERS) for strategy in GOSSIP for transport in ("shared_memory", "sockets")],
        ("ps:ssp=2", "shared_memory", WORKERS),
        ("ps:async", "shared_memory", WORKERS),
        # Over sockets a worker that is lost takes its shards with it, unless servers of their own hold them.
        ("ps:ssp=2,servers=1", "sockets", WORKERS + 1),
        ("ps:async,servers=1", "sockets", WORKERS + 1),
    ],
)
def test_others_go_on_without_a_stopped_rank(
    strategy: str, transport: str, processes: int, capfd: pytest.CaptureFixture[str]
) -> None:
    found = tutti.launch(train, strategy, "stop", workers=processes, transport=transport)
    assert found[VICTIM] is None
    rest = [each for rank, each in enumerate(found) if rank < WORKERS and each is not None]
    assert len(rest) == WORKERS - 1
    assert len({each["total"] for each in rest}) == 1, "they end with one model"
    said = said_by(capfd)
    assert f"[rank {VICTIM}] was killed by the launcher: its process" in said
    assert "the others go on without it" in said


# --- a killed launcher ---


def starts_children() -> None:
    """Start a program and a worker of a DataLoader, say who they are, and wait."""
    world = tutti.init()
    program = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"])
    loader = DataLoader(TensorDataset(torch.arange(64.0)), num_workers=1, persistent_workers=True)
    batches = iter(loader)
    next(batches)
    children = [program.pid, *(worker.pid for worker in batches._workers)]  # type: ignore[attr-defined]
    SupervisorPipe().progress(children=[*children, os.getpid()])
    world.transport.all_reduce(torch.ones(1)).wait()  # type: ignore[attr-defined]
    signal.pause()


def launch_and_tell() -> None:
    tutti.launch(starts_children, workers=2, watch=lambda _, values: print("pids", *values["children"], flush=True))


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_nothing_outlives_a_killed_launcher(start: str) -> None:
    """Not even what the workers have started."""
    code = f"import sys; sys.path[:0] = {sys.path!r}; import test_faults; test_faults.launch_and_tell()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "TUTTI_START": start}
    ) as launcher:
        assert launcher.stdout is not None
        try:
            lines = [launcher.stdout.readline() for _ in range(2)]
            pids = [int(word) for line in lines for word in line.split()[1:]]
            assert len(pids) == 6
        finally:
            launcher.kill()
        launcher.wait(10)
        # The end of the pipe: all that had it are gone.
        launcher.stdout.read()
    deadline = time.monotonic() + 5
    while (left := [pid for pid in pids if start_time(pid) != -1]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


# --- ranks that wait for each other ---


@pytest.mark.parametrize("transport", ["shared_memory", "sockets"])
@pytest.mark.parametrize("strategy", ["native", "ring"])
def test_an_operation_of_one_rank_alone_is_a_deadlock(strategy: str, transport: str) -> None:
    with pytest.raises(WorkerFailed) as failed:
        tutti.launch(train, strategy, "reduce", workers=WORKERS, transport=transport)
    said = str(failed.value)
    assert "ranks wait for each other, and none can go on" in said
    for rank in range(WORKERS):
        assert f"rank {rank} (step {FAULT_AT + 1}) waits for rank" in said
    assert "All ranks must call the same operations in the same order" in said
