"""Train a recipe: what every worker of `tutti train` runs."""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from tutti.collectives import native
from tutti.data.shard import ShardedLoader, shard
from tutti.errors import ConfigError
from tutti.job import Job, distribute
from tutti.launch import init
from tutti.launch.supervisor_pipe import SupervisorPipe
from tutti.recipes import Recipe, collate, recipe
from tutti.recipes.data import MapDataset
from tutti.strategies import parse
from tutti.world import World

_REPORTS = 500
"""About so many in a run, however fast it is: enough for a curve."""

_REPORT_SECONDS = 2.0
"""A slow run reports this often too, unless its seconds are only simulated."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """What to train and how; the same on every worker."""

    recipe: str
    options: dict[str, Any] = field(default_factory=dict)
    """The recipe's own."""
    strategy: str = "native"
    data: str | None = None
    epochs: int | None = None
    batch_size: int | None = None
    """Over all workers together; the recipe's own if None."""
    until: float | None = None
    """Test accuracy after which to stop, at the end of an epoch, where all ranks know it."""
    seed: int = 0
    lr_scale: float = 1.0
    """Times the recipe's learning rate: updates that come late need a lower one."""
    double: bool = False
    """Whether to compute in float64, where runs on different numbers of workers can be compared closely."""


@dataclass(frozen=True)
class TrainingResult:
    """How a run went, on one rank. Only the leader knows the accuracy, unless the strategy is synchronous."""

    loss: float
    accuracy: float
    target: float
    steps: int
    samples: int
    seconds: float
    bytes_sent: int
    waiting_share: float
    strategy_metrics: dict[str, Any]
    """What the strategy itself reports: `job.metrics.strategy`."""
    parameters: Tensor

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "parameters"}


class GlobalBatches(Sampler[list[int]]):
    """Shuffled batches of the same samples however many workers there are, each cut into one part per worker.

    The last takes what would be left after it, so that none is smaller than `batch_size`, and up to so many workers
    have a part of each.
    """

    alike = True
    """Drawn the same by every rank, without asking the others."""

    def __init__(self, num_samples: int, batch_size: int, num_parts: int, seed: int) -> None:
        self.num_samples = num_samples
        self.num_parts = num_parts
        self._cuts = list(range(batch_size, num_samples - batch_size + 1, batch_size))
        self._generator = torch.Generator().manual_seed(seed)
        if num_parts > (smallest := min(batch_size, num_samples)):
            raise ConfigError(
                f"a batch of {smallest} samples cannot be cut for {num_parts} workers: each needs at least one. "
                f"Use {smallest} workers or fewer."
            )

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.num_samples, generator=self._generator)
        for batch in order.tensor_split(self._cuts):
            yield from (part.tolist() for part in batch.tensor_split(self.num_parts))

    def __len__(self) -> int:
        return (len(self._cuts) + 1) * self.num_parts


def train(task: TrainingConfig) -> TrainingResult:
    """Train on this rank, together with the others, reporting as it goes."""
    world = init()
    made = recipe(task.recipe, **task.options)
    torch.manual_seed(task.seed)
    model = made.model().double() if task.double else made.model()
    optimizer = made.optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] *= task.lr_scale
    splits = made.data(Path(task.data) if task.data else None)
    epochs = task.epochs or made.epochs
    strategy = parse(task.strategy)
    with distribute(model, optimizer, strategy, world=world) as job:
        world = job.world
        batches = GlobalBatches(len(splits.train), task.batch_size or made.batch_size, world.size, task.seed)
        loader = ShardedLoader(DataLoader(splits.train, batch_sampler=batches, collate_fn=collate), 0, world)
        progress = _Progress(job, world, epochs, len(loader), len(splits.train))
        for epoch in range(epochs):
            for x, y in loader:
                loss = made.loss(model(x.double() if task.double and x.is_floating_point() else x), y)
                job.watch(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                progress.step(loss)
            if strategy.synchronous:
                with job.consensus():
                    accuracy = evaluate(made, model, shard(_whole(splits.test), world=world), world, task.double)
                progress.epoch(loss, accuracy)
                if task.until is not None and accuracy >= task.until:
                    break
            elif job.is_leader and epoch + 1 < epochs:
                # The other ranks train on meanwhile, unless every step needs all ranks.
                with nullcontext() if strategy.needs_all_ranks else job.away():
                    progress.epoch(loss, evaluate(made, model, _whole(splits.test), None, task.double))
        metrics, is_leader = job.metrics, job.is_leader
    if not strategy.synchronous:  # When all have finished, all have the same.
        accuracy = evaluate(made, model, _whole(splits.test), None, task.double) if is_leader else float("nan")
        if is_leader:
            progress.epoch(loss, accuracy)
    return TrainingResult(
        loss=float(loss.detach()),
        accuracy=accuracy,
        target=made.target,
        steps=metrics.steps,
        samples=(epoch + 1) * len(splits.train),
        seconds=metrics.seconds,
        bytes_sent=metrics.bytes_sent,
        waiting_share=metrics.waiting_share,
        strategy_metrics=metrics.strategy,
        parameters=torch.cat([p.detach().reshape(-1) for p in model.parameters()]),
    )


def evaluate(made: Recipe, model: nn.Module, batches: Iterable[Any], world: World | None, double: bool) -> float:
    """Test accuracy of the model as it is: over what is given here, and what is given to the others of a world."""
    right = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        model.eval()
        for x, y in batches:
            scores = model(x.double() if double and x.is_floating_point() else x)
            right += torch.tensor([float(made.accuracy(scores, y)) * len(y), len(y)])
        model.train()
    if world is not None:
        native(right, world.transport)
    return float(right[0] / right[1])


def _whole(test: MapDataset) -> DataLoader[Any]:
    return DataLoader(test, batch_size=256, collate_fn=collate)


class _Progress:
    """Tells whoever watches how far the first rank is: every so many steps, and by time where time is real.

    In a simulation all ranks tell: it costs nothing there, and one part of a small batch says little.
    """

    def __init__(self, job: Job, world: World, epochs: int, steps: int, samples: int) -> None:
        """`steps` and `samples` are of one epoch."""
        self._job, self._steps, self._samples = job, steps, samples
        self._total_steps = epochs * steps
        simulated = world.transport.cluster is not None
        self._simulated = simulated
        self._link = SupervisorPipe()
        self._every = -(-self._total_steps // _REPORTS)
        self._patience_s = float("inf") if simulated else _REPORT_SECONDS
        self._now = world.transport.now
        self._last_s = self._now()
        self._zero_s = 0.0 if simulated else self._last_s - job.metrics.seconds

    def step(self, loss: Tensor) -> None:
        first_or_due = self._job.steps % self._every == 1 % self._every
        due = first_or_due or self._now() - self._last_s > self._patience_s
        if due and (self._simulated or self._job.is_leader):
            self._send("step", loss=float(loss.detach()))

    def epoch(self, loss: Tensor, accuracy: float) -> None:
        if self._job.is_leader:
            self._send("epoch", loss=float(loss.detach()), accuracy=accuracy)

    def _send(self, kind: str, **values: float) -> None:
        metrics = self._job.metrics
        self._last_s = self._now()
        epoch = metrics.steps / self._steps
        old = metrics.strategy.get("staleness")
        stale = {"staleness": round(sum(k * n for k, n in old.items()) / sum(old.values()), 3)} if old else {}
        self._link.progress(
            kind=kind,
            epoch=round(epoch, 4),
            step=metrics.steps,
            total_steps=self._total_steps,
            seconds=float(f"{self._last_s - self._zero_s:.6g}"),
            samples_per_s=round(epoch * self._samples / metrics.seconds, 1),
            bytes_sent=metrics.bytes_sent,
            waiting_share=round(metrics.waiting_share, 4),
            **stale,
            **values,
        )
