"""Train a recipe: what every worker of `tutti train` runs."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from tutti.collectives import native
from tutti.job import Job, distribute
from tutti.launch import init
from tutti.launch.link import Link
from tutti.recipes import Recipe, collate, recipe
from tutti.recipes.data import MapDataset
from tutti.shard import ShardedLoader, shard
from tutti.strategies import parse
from tutti.world import World

_REPORT_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to train and how; the same on every worker."""

    recipe: str
    options: dict[str, Any] = field(default_factory=dict)
    """The recipe's own."""
    strategy: str = "native"
    data: str | None = None
    epochs: int | None = None
    seed: int = 0
    double: bool = False
    """Whether to compute in float64, where runs on different numbers of workers can be compared closely."""


@dataclass(frozen=True)
class Outcome:
    """How a run went, on rank 0."""

    loss: float
    accuracy: float
    target: float
    steps: int
    samples: int
    seconds: float
    bytes_sent: int
    waiting_share: float
    parameters: Tensor

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "parameters"}


_MIN_TAIL = 32
"""A last batch smaller than this joins the one before, so that up to so many workers all have a part of each."""


class GlobalBatches(Sampler[list[int]]):
    """Shuffled batches of the same samples however many workers there are, each cut into one part per worker."""

    def __init__(self, num_samples: int, batch_size: int, num_parts: int, seed: int) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.num_parts = num_parts
        self._generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.num_samples, generator=self._generator)
        for batch in order.tensor_split(self._cuts()):
            yield from (part.tolist() for part in batch.tensor_split(self.num_parts))

    def __len__(self) -> int:
        return (len(self._cuts()) + 1) * self.num_parts

    def _cuts(self) -> list[int]:
        last = self.num_samples - min(_MIN_TAIL, self.batch_size)
        return [start for start in range(self.batch_size, self.num_samples, self.batch_size) if start <= last]


def train(task: Task) -> Outcome:
    """Train on this rank, together with the others, reporting as it goes."""
    world, link = init(), Link()
    made = recipe(task.recipe, **task.options)
    torch.manual_seed(task.seed)
    model = made.model().double() if task.double else made.model()
    optimizer = made.optimizer(model)
    splits = made.data(Path(task.data) if task.data else None)
    batches = GlobalBatches(len(splits.train), made.batch_size, world.size, task.seed)
    loader = ShardedLoader(DataLoader(splits.train, batch_sampler=batches, collate_fn=collate), 0, world)
    epochs = task.epochs or made.epochs
    with distribute(model, optimizer, parse(task.strategy), world=world) as job:
        progress = _Progress(job, link, world, epochs * len(loader), epochs * len(splits.train))
        for epoch in range(epochs):
            for x, y in loader:
                loss = made.loss(model(x.double() if task.double and x.is_floating_point() else x), y)
                job.watch(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                progress.step(loss, epoch)
            accuracy = evaluate(made, model, splits.test, job, world, task.double)
            progress.epoch(loss, epoch, accuracy)
        metrics = job.metrics
    return Outcome(
        loss=float(loss.detach()),
        accuracy=accuracy,
        target=made.target,
        steps=metrics.steps,
        samples=epochs * len(splits.train),
        seconds=metrics.seconds,
        bytes_sent=metrics.bytes_sent,
        waiting_share=metrics.waiting_share,
        parameters=torch.cat([p.detach().reshape(-1) for p in model.parameters()]),
    )


def evaluate(made: Recipe, model: nn.Module, test: MapDataset, job: Job, world: World, double: bool) -> float:
    """Test accuracy of the model the ranks agree on, each rank doing its part."""
    right = torch.zeros(2, dtype=torch.float64)
    with job.consensus(), torch.no_grad():
        model.eval()
        for x, y in shard(DataLoader(test, batch_size=256, collate_fn=collate), world=world):
            scores = model(x.double() if double and x.is_floating_point() else x)
            right += torch.tensor([float(made.accuracy(scores, y)) * len(y), len(y)])
        model.train()
    native(right, world.transport)
    return float(right[0] / right[1])


class _Progress:
    """Tells the supervisor how far rank 0 is, a few times a second."""

    def __init__(self, job: Job, link: Link, world: World, total_steps: int, total_samples: int) -> None:
        self._job, self._total_steps, self._total_samples = job, total_steps, total_samples
        self._link = link if world.rank == 0 else None
        self._now = world.transport.now
        self._last_s = float("-inf")

    def step(self, loss: Tensor, epoch: int) -> None:
        if self._link is None or self._now() - self._last_s < _REPORT_SECONDS:
            return
        self._last_s = self._now()
        self._send("step", epoch, loss=float(loss.detach()))

    def epoch(self, loss: Tensor, epoch: int, accuracy: float) -> None:
        if self._link is not None:
            self._send("epoch", epoch, loss=float(loss.detach()), accuracy=accuracy)

    def _send(self, kind: str, epoch: int, **values: float) -> None:
        metrics = self._job.metrics
        samples = self._total_samples * metrics.steps / self._total_steps
        assert self._link is not None
        self._link.progress(
            kind=kind,
            epoch=epoch,
            step=metrics.steps,
            total_steps=self._total_steps,
            seconds=round(metrics.seconds, 4),
            samples_per_s=round(samples / metrics.seconds, 1),
            bytes_sent=metrics.bytes_sent,
            waiting_share=round(metrics.waiting_share, 4),
            **values,
        )
