"""The cost of a checkpoint a minute: training time with and without it, the copy of the state, and the files' size.

Blocks of steps with and without a checkpoint take turns in one run. What a block with one takes longer, writing in the
background included, is the cost of one checkpoint; its share of a minute is the cost at one checkpoint a minute. A
block is shorter than a minute, because noise grows with its length and the cost does not.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tutti.bench.checkpoints.files import size_ratio
from tutti.bench.models import make_benchmark_model
from tutti.checkpoint.index import newest_complete
from tutti.collectives import all_gather_json
from tutti.job import Job, distribute
from tutti.launch import init
from tutti.launch.supervisor_pipe import SupervisorPipe

_MINUTE_S = 60.0
_WARM_UP_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class CheckpointCost:
    """The cost of checkpoints of one model; medians."""

    model: str
    state_bytes: int
    """Bytes of the model and its optimiser's state."""
    step_s: float
    extra_s: float
    """Seconds by which one checkpoint makes training longer."""
    snapshot_s: float
    """Seconds that the training loop is held up."""
    copy_s: float
    """Seconds of a copy of the same state, into memory that is in use already."""
    size_ratio: float
    """Size of the files, relative to the tensors in them."""

    @property
    def share(self) -> float:
        """Share of training time at one checkpoint a minute."""
        return self.extra_s / _MINUTE_S

    @property
    def times_copy(self) -> float:
        """Time of the snapshot, relative to a copy."""
        return self.snapshot_s / self.copy_s

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and both ratios as JSON types."""
        return {**asdict(self), "share": self.share, "times_copy": self.times_copy}


class _Training:
    """One rank's training, with the clock of the slowest rank."""

    def __init__(self, model: str, folder: Path) -> None:
        self.world = init()
        torch.manual_seed(self.world.rank)
        benchmark = make_benchmark_model(model, self.world.size)
        self._model, (self._x, self._y), self._loss = benchmark
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-4)
        self.job: Job = distribute(self._model, self._optimizer, world=self.world)
        self.folder = folder
        for _ in range(_WARM_UP_STEPS):
            self.step()

    def step(self) -> None:
        """Take one step."""
        self._loss(self._model(self._x), self._y).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of the model and its optimiser."""
        states = [value for state in self._optimizer.state.values() for value in state.values()]
        return [each.detach() for each in (*self._model.state_dict().values(), *states)]

    def seconds(self, function: Callable[[], Any]) -> float:
        """Return the time of a function on the slowest rank; all start together. Collective."""
        all_gather_json(0, self.world.transport)
        start_s = time.perf_counter()
        function()
        return float(max(all_gather_json(time.perf_counter() - start_s, self.world.transport)))

    def block(self, num_steps: int) -> None:
        """Take steps without checkpoints."""
        for _ in range(num_steps):
            self.step()

    def block_with(self, num_steps: int) -> float:
        """Take a checkpoint, and steps while it is written; return how long the loop was held up."""
        start_s = time.perf_counter()
        self.job.checkpoint(self.folder)
        snapshot_s = time.perf_counter() - start_s
        for _ in range(num_steps):
            self.step()
            # Not due within the benchmark: what a loop pays for asking in every step.
            self.job.checkpoint(self.folder, every="1h")
        # Writing that outlasts the block would slow the next one.
        for writer in self.job._checkpoints._writers.values():
            writer.flush()
        return snapshot_s


def measure(model: str, folder: str, rounds: int, block_s: float) -> dict[str, Any]:
    """Train blocks with and without a checkpoint in turn, and return a `CheckpointCost` as a dict. Collective."""
    training, supervisor = _Training(model, Path(folder)), SupervisorPipe()
    step_s = training.seconds(lambda: training.block(_WARM_UP_STEPS)) / _WARM_UP_STEPS
    num_steps = max(1, round(block_s / step_s))
    tensors = training.tensors()
    copies = [each.clone() for each in tensors]
    is_first = training.world.rank == 0
    training.block_with(1)  # The first allocates memory.
    plain: list[float] = []
    extra: list[float] = []
    held_up: list[float] = []
    copy: list[float] = []
    blocks = [lambda: training.block(num_steps), lambda: held_up.append(training.block_with(num_steps))]
    for number in range(rounds):
        supervisor.progress(doing=f"{model}: round {number + 1} of {rounds}")
        # Every other round the other way round: what comes second finds a warmer machine.
        order = (0, 1) if number % 2 == 0 else (1, 0)
        seconds = {which: training.seconds(blocks[which]) for which in order}
        plain.append(seconds[0] / num_steps)
        extra.append(seconds[1] - seconds[0])
        # Others wait, as they do while the first rank takes a snapshot.
        copy.append(training.seconds(lambda: _copy(tensors, copies) if is_first else None))
    snapshot_s = max(all_gather_json(statistics.median(held_up), training.world.transport))
    training.job.finish()
    newest = newest_complete(Path(folder)) if is_first else None
    return CheckpointCost(
        model=model,
        state_bytes=sum(each.nbytes for each in tensors),
        step_s=statistics.median(plain),
        extra_s=statistics.median(extra),
        snapshot_s=snapshot_s,
        copy_s=statistics.median(copy),
        size_ratio=size_ratio(newest) if newest else 0.0,
    ).as_dict()


def _copy(tensors: list[torch.Tensor], copies: list[torch.Tensor]) -> None:
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor)
