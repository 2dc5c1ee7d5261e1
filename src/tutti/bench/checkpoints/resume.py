"""Time to the first step of a run that continues, beside one that starts, and beside reading the checkpoint's files.

A round is a start without a checkpoint, a start with one, and reading its files in this process. All read from the
disk: the system's copies in memory are dropped before.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tutti.bench.checkpoints.files import forget, seconds_to_read
from tutti.bench.models import make_benchmark_model
from tutti.checkpoint.index import newest_complete
from tutti.job import distribute
from tutti.launch import init
from tutti.launch.local import launch
from tutti.launch.supervisor_pipe import SupervisorPipe


@dataclass(frozen=True, kw_only=True)
class ResumeTimes:
    """Seconds to the first step; medians."""

    model: str
    state_bytes: int
    start_s: float
    """From the launch to the end of the first step, without a checkpoint."""
    resume_s: float
    """The same, with one."""
    read_s: float
    """Reading the files of the checkpoint alone."""

    @property
    def times_read(self) -> float:
        """Time that continuing adds to a start, relative to reading the files."""
        return (self.resume_s - self.start_s) / self.read_s

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and the ratio as JSON types."""
        return {**asdict(self), "times_read": self.times_read}


def first_step(model: str, folder: str, save: bool) -> None:
    """Continue from a checkpoint if there is one, and take a step; `save` a checkpoint after it if asked."""
    world = init()
    torch.manual_seed(world.rank)
    benchmark = make_benchmark_model(model, world.size)
    optimizer = torch.optim.Adam(benchmark.model.parameters(), lr=1e-4)
    job = distribute(benchmark.model, optimizer, world=world)
    job.restore(folder)
    x, y = benchmark.batch
    benchmark.loss(benchmark.model(x), y).backward()
    optimizer.step()
    # The monotonic clock is the same in all processes of a machine.
    SupervisorPipe().progress(first_step=time.monotonic())
    if save:
        job.checkpoint(folder)
    job.finish()


def measure(
    model: str, folder: Path, workers: int, rounds: int, show: Callable[[str], None] = lambda text: None
) -> ResumeTimes:
    """Time starts with and without a checkpoint, in turn."""
    _seconds(model, folder / "run", workers, save=True)  # Also starts the fork server.
    checkpoint = newest_complete(folder / "run")
    assert checkpoint is not None
    seconds: dict[str, list[float]] = {"start": [], "resume": [], "read": []}
    for number in range(rounds):
        show(f"starting {model}: round {number + 1} of {rounds}")
        seconds["start"].append(_seconds(model, folder / "none", workers))
        forget(checkpoint)
        seconds["resume"].append(_seconds(model, folder / "run", workers))
        forget(checkpoint)
        seconds["read"].append(seconds_to_read(checkpoint))
    start_s, resume_s, read_s = (statistics.median(each) for each in seconds.values())
    size = sum(path.stat().st_size for path in checkpoint.iterdir())
    return ResumeTimes(model=model, state_bytes=size, start_s=start_s, resume_s=resume_s, read_s=read_s)


def _seconds(model: str, folder: Path, workers: int, save: bool = False) -> float:
    """Launch, and return the seconds until the last rank has taken its first step."""
    steps: list[float] = []

    def watch(rank: int, values: dict[str, Any]) -> None:
        steps.append(values["first_step"])

    start_s = time.monotonic()
    launch(first_step, model, str(folder), save, workers=workers, watch=watch)
    return max(steps) - start_s
