"""Faults for `tutti bench faults`: a small training job, and what goes wrong in one of its ranks.

Each rank reports its process, when a fault begins in it (`injected`), and when it hears that a rank is lost
(`noticed`), all in seconds of the machine's monotonic clock, which all processes of one host share.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tutti.data.shard import shard
from tutti.job.distribution import distribute
from tutti.launch import init
from tutti.launch.supervisor_pipe import SupervisorPipe
from tutti.world import World

PAUSE_S = 3.0
"""How long a fault lasts that ends by itself."""

_BATCH, _FEATURES = 8, 16


@dataclass(frozen=True)
class FaultCase:
    """One run: which fault happens to which rank, and when."""

    kind: str
    strategy: str
    transport: str
    victim: int
    step: int
    """The step before which it happens."""
    steps: int = 60
    workers: int = 3


class _Samples(Dataset[Tensor]):
    """Random samples, one of which may take long."""

    def __init__(self, number: int) -> None:
        self._data = torch.randn(number, _FEATURES)
        self.pause_s = 0.0

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Tensor:
        pause_s, self.pause_s = self.pause_s, 0.0
        time.sleep(pause_s)
        return self._data[index]


class _Pausing(nn.Module):
    """Passes its input on, once after a pause."""

    pause_s = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        pause_s, self.pause_s = self.pause_s, 0.0
        time.sleep(pause_s)
        return inputs


@dataclass
class _Job:
    """What a fault can reach."""

    world: World
    samples: _Samples
    pausing: _Pausing
    model: nn.Module


def train(case: FaultCase) -> int:
    """Train with the fault of `case`; return the number of steps that were taken."""
    torch.set_num_threads(1)
    world = init()
    supervisor = SupervisorPipe()
    supervisor.progress(pid=os.getpid())
    _report_losses(world, supervisor)
    torch.manual_seed(0)
    pausing = _Pausing()
    model = nn.Sequential(nn.Linear(_FEATURES, 64), nn.Tanh(), pausing, nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = distribute(model, optimizer, case.strategy)
    samples = _Samples(case.steps * _BATCH * case.workers)
    faulty = _Job(world, samples, pausing, model)
    step = 0
    for step, batch in enumerate(shard(DataLoader(samples, batch_size=_BATCH)), 1):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == case.step and world.rank == case.victim:
            supervisor.progress(injected=time.monotonic())
            FAULTS[case.kind](faulty)
    job.finish()
    return step


def _report_losses(world: World, supervisor: SupervisorPipe) -> None:
    """Report when this rank first hears that another one is lost."""
    member = world.transport.membership.member  # type: ignore[attr-defined]
    told: list[bool] = []

    def changed() -> None:
        if member.known.lost and not told:
            told.append(True)
            supervisor.progress(noticed=time.monotonic())

    member.on_change(changed)


def _kill(job: _Job) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(job: _Job) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise(job: _Job) -> None:
    raise RuntimeError("a mistake in the user's code")


def _exit(job: _Job) -> None:
    sys.exit(3)


def _slow_loader(job: _Job) -> None:
    job.samples.pause_s = PAUSE_S


def _slow_forward(job: _Job) -> None:
    job.pausing.pause_s = PAUSE_S


def _evaluate(job: _Job) -> None:
    """Evaluate, as a script does that checks its model on rank 0 alone."""
    job.model.eval()
    until = time.monotonic() + PAUSE_S
    with torch.no_grad():
        while time.monotonic() < until:
            job.model(torch.randn(_BATCH, _FEATURES))
    job.model.train()


def _reduce_alone(job: _Job) -> None:
    """Start an operation that no other rank starts."""
    job.world.transport.all_reduce(torch.ones(1)).wait()  # type: ignore[attr-defined]


def _hold_interpreter_lock(job: _Job) -> None:
    # PyDLL, unlike CDLL, does not release the lock during the call.
    ctypes.PyDLL(None).usleep(int(PAUSE_S * 1e6))


def _stop_coordinator(job: _Job) -> None:
    """Stop the launcher, which serves the coordinator. A small process continues it: this rank trains on."""
    launcher = int(os.environ["TUTTI_BENCH_LAUNCHER"])
    os.kill(launcher, signal.SIGSTOP)
    if os.fork() == 0:
        time.sleep(PAUSE_S)
        os.kill(launcher, signal.SIGCONT)
        os._exit(0)


FAULTS: dict[str, Callable[[_Job], Any]] = {
    "none": lambda job: None,
    "killed": _kill,
    "stopped": _stop,
    "exception": _raise,
    "exit": _exit,
    "slow loader": _slow_loader,
    "slow forward": _slow_forward,
    "evaluation": _evaluate,
    "deadlock": _reduce_alone,
    "interpreter lock": _hold_interpreter_lock,
    "coordinator stopped": _stop_coordinator,
}
"""Functions that inject a fault into the rank that runs them, by the name of the kind."""
