"""Ranks that stop, die or wait for each other, in real processes: who is named, who goes on, and what is left."""

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import nn

import tutti
from tutti.errors import WorkerFailed

WORKERS, VICTIM, STEPS, FAULT_AT = 3, 1, 40, 12
PATIENCE_S = 1.0
EVICTED_WITHIN_S = 1.5 + 1.0
"""A process is looked at after 1.5 s of silence, which is more than the patience here; and a second for the rest."""


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
    assert f"[rank {VICTIM}] was stopped: its process" in said
    assert "the others go on without it" in said
