"""`TrainingLoop`: the loop behind `tutti train` and `tutti.fit`, with the checkpoints and evaluations of a run."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from tutti.checkpoint.index import candidates
from tutti.checkpoint.interval import Every
from tutti.data.sharded_data import ShardedData
from tutti.job import Job
from tutti.recipes.learning_rate import RateSchedule

Measured = TypeVar("Measured")


class RunCheckpoints:
    """The checkpoints of a run, if it is to have any."""

    def __init__(
        self, job: Job, folder: str | None, every: Every, parts: tuple[Any, ...], extra: Mapping[str, Any] | None = None
    ) -> None:
        """Continue from the newest one. Collective.

        Args:
            folder: of the checkpoints; None to write none.
            parts: what is saved beside the job, as for `job.checkpoint`.
        """
        self._job, self._folder, self._every = job, folder, every
        self._parts, self._extra = parts, extra
        # All ranks are on one machine or share the folder: they see the same.
        if folder is not None and candidates(Path(folder)):
            job.restore(folder, *parts)

    def step(self) -> None:
        """Write a checkpoint if one is due. Collective."""
        if self._folder is not None:
            self._job.checkpoint(self._folder, *self._parts, every=self._every, extra=self._extra)

    def end(self) -> None:
        """Write the last one. Collective."""
        if self._folder is not None:
            self._job.checkpoint(self._folder, *self._parts, extra=self._extra)


@dataclass(kw_only=True)
class TrainingLoop:
    """Epochs of steps on this rank, together with all other ranks."""

    job: Job
    optimizer: Optimizer
    batches: ShardedData
    """This rank's part of the data."""
    forward: Callable[[Any], Tensor]
    """Computes the loss of a batch."""
    schedule: RateSchedule
    checkpoints: RunCheckpoints
    after_step: Callable[[Tensor], None]
    """Called with the loss after every step, before a checkpoint may be written."""
    after_epoch: Callable[[Tensor], bool]
    """Called with the last loss after every epoch; returns whether to stop. Under a synchronous strategy all ranks
    must return the same."""
    steps_s: float = 0.0
    """Seconds in steps so far: loading, forward, backward, exchange and optimiser."""

    def run(self, epochs: int) -> Tensor:
        """Train until so many epochs are done, those of a restored checkpoint included; return the last loss.

        It is NaN if no step was left to take.
        """
        job, optimizer, now = self.job, self.optimizer, self.job.world.transport.now
        loss = torch.tensor(nan)
        for epoch in self.batches.epochs(epochs):
            start_s = now()
            for batch in epoch:
                self.schedule.set(job.steps)
                loss = self.forward(batch)
                job.watch(loss)  # Before backward, whose exchange stops all ranks if the loss is not finite.
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                self.after_step(loss)
                self.checkpoints.step()
            self.steps_s += now() - start_s
            if self.after_epoch(loss):
                break
        return loss


def measure_agreed(job: Job, measure: Callable[[bool], Measured], *, last: bool) -> Measured | None:
    """Measure the model at the end of an epoch; None where this rank takes no part in it.

    Under a synchronous strategy all ranks measure together, on the parameters that they agree on. Otherwise the leader
    does so alone. The others train on meanwhile, unless a step is made of the gradients of all ranks, as those of a
    synchronous start are: steps without the leader's would have fewer samples, and so would those in which it trains on
    the rest of its data alone. After the last epoch the caller measures, once the job has finished.

    Args:
        measure: called with whether all ranks call it.
    """
    if job.strategy.synchronous:
        with job.consensus(optimizer=False):
            return measure(True)
    if job.is_leader and not last:
        waits = job.strategy.needs_all_ranks or job.strategy.steps_by_mean_gradient or job.starts_synchronously
        with nullcontext() if waits else job.away():
            return measure(False)
    return None
