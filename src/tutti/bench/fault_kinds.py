"""Faults for `tutti bench faults`: a small training job, and what goes wrong in one of its ranks.

Each rank reports its process, when a fault begins in it (`injected`), and when it hears that a rank is lost
(`noticed`), all in seconds of the machine's monotonic clock, which all processes of one host share.
"""

import ctypes
import mmap
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tutti.data.shard import shard
from tutti.errors import RankLost
from tutti.job.distribution import distribute
from tutti.launch import init
from tutti.launch.lab import namespaces
from tutti.launch.supervisor_pipe import SupervisorPipe
from tutti.world import World

PAUSE_S = 3.0
"""How long a fault lasts that ends by itself."""

_BATCH, _FEATURES = 8, 16
_PAGED_BYTES = 4 << 20


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
    lab: str | None = None
    """The emulated hosts that it runs on, as `--lab` describes them; None: this machine."""


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


class _PausingSgd(torch.optim.SGD):
    """SGD, one step of which may take long."""

    pause_s = 0.0

    def step(self, closure: Any = None) -> Any:
        pause_s, self.pause_s = self.pause_s, 0.0
        time.sleep(pause_s)
        return super().step(closure)


@dataclass
class _Job:
    """What a fault can reach."""

    world: World
    samples: _Samples
    pausing: _Pausing
    model: nn.Module
    optimizer: _PausingSgd

    def step(self, batch: Tensor) -> None:
        """Train one step."""
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def train(case: FaultCase) -> int:
    """Train with the fault of `case`; return the number of steps that were taken."""
    torch.set_num_threads(1)
    world = init()
    supervisor = SupervisorPipe()
    supervisor.progress(pid=os.getpid())
    noticed = _report_losses(world, supervisor)
    torch.manual_seed(0)
    pausing = _Pausing()
    model = nn.Sequential(nn.Linear(_FEATURES, 64), nn.Tanh(), pausing, nn.Linear(64, 4))
    optimizer = _PausingSgd(model.parameters(), lr=0.01)
    job = distribute(model, optimizer, case.strategy)
    samples = _Samples(case.steps * _BATCH * case.workers)
    faulty = _Job(world, samples, pausing, model, optimizer)
    step = 0
    try:
        for step, batch in enumerate(shard(DataLoader(samples, batch_size=_BATCH)), 1):
            faulty.step(batch)
            if step == case.step and world.rank == case.victim:
                supervisor.progress(injected=time.monotonic())
                FAULTS[case.kind](faulty)
        job.finish()
    except RankLost:
        noticed()  # Perhaps from the lost rank's own connection, before the coordinator has told.
        raise
    return step


def _report_losses(world: World, supervisor: SupervisorPipe) -> Callable[[], None]:
    """Report when this rank first hears that another one is lost. Returns what reports it, unless that was done."""
    member = world.transport.membership.member  # type: ignore[attr-defined]
    told: list[bool] = []

    def noticed() -> None:
        if not told:
            told.append(True)
            supervisor.progress(noticed=time.monotonic())

    member.on_change(lambda: noticed() if member.known.lost else None)
    return noticed


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


def _slow_optimizer(job: _Job) -> None:
    job.optimizer.pause_s = PAUSE_S


def _step_alone(job: _Job) -> None:
    """Take a step that no other rank takes, as a script does whose ranks have different numbers of batches."""
    job.step(torch.randn(_BATCH, _FEATURES))


def _optimize_alone(job: _Job) -> None:
    """Step the optimiser once more, without a backward pass, as a script does that steps on one rank only."""
    for parameter in job.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    job.optimizer.step()
    job.optimizer.zero_grad()


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


def _page_in(job: _Job) -> None:
    """Read memory back from the disk, page by page, as a process does that the system swaps.

    The memory is that of a file. It is taken away again after each round, so every access goes to the disk.
    """
    page = mmap.PAGESIZE
    until = time.monotonic() + PAUSE_S
    # Not in /tmp, which may be in memory itself.
    with tempfile.TemporaryFile(dir="/var/tmp") as file:
        file.write(os.urandom(_PAGED_BYTES))
        file.flush()
        os.fsync(file.fileno())
        with mmap.mmap(file.fileno(), _PAGED_BYTES, prot=mmap.PROT_READ) as memory:
            memory.madvise(mmap.MADV_RANDOM)  # No page is read before it is asked for.
            while time.monotonic() < until:
                for start in range(0, _PAGED_BYTES, page):
                    memory[start]
                memory.madvise(mmap.MADV_DONTNEED)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _cut_link(job: _Job) -> None:
    """Take down the link of this rank's host. The launcher puts it up again after the run."""
    namespaces.batch("ip", ["link set eth0 down"])


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
    "slow optimizer": _slow_optimizer,
    "evaluation": _evaluate,
    "memory": _page_in,
    "step alone": _step_alone,
    "optimizer alone": _optimize_alone,
    "link cut": _cut_link,
    "deadlock": _reduce_alone,
    "interpreter lock": _hold_interpreter_lock,
    "coordinator stopped": _stop_coordinator,
}
"""Functions that inject a fault into the rank that runs them, by the name of the kind."""
