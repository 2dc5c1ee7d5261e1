"""A small training run that checkpoints every few steps, records the samples of every step, and can be continued."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

from tutti.bench.checkpoints.records import Record
from tutti.data.shard import shard
from tutti.job.distribution import distribute
from tutti.launch import init
from tutti.launch.supervisor_pipe import SupervisorPipe
from tutti.parallel import Mesh
from tutti.strategies import parse

NUM_SAMPLES = 300
"""Samples of an epoch: 25 steps of two ranks, and every step has samples for each of four ranks."""
_BATCH, _FEATURES, _HIDDEN, _CLASSES = 6, 16, 64, 4


@dataclass(frozen=True)
class RunSettings:
    """A run that may take several attempts."""

    strategy: str
    folder: str
    """Where its checkpoints and records are."""
    epochs: int
    every: int = 3
    """Steps between two checkpoints."""
    tensor: int = 1
    """Number of ranks that split the model."""

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return Path(self.folder) / "checkpoints"


@dataclass(frozen=True)
class Result:
    """The end of a run, on one rank."""

    steps: int
    parameters: list[float]
    loss: float
    """Mean loss of all samples."""


class NumberedSamples(Dataset[tuple[Tensor, Tensor, int]]):
    """Random samples with their numbers."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(NUM_SAMPLES, _FEATURES, generator=generator, dtype=torch.float64)
        self.targets = self.inputs[:, :_CLASSES].sin()

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.inputs[index], self.targets[index], index


def train(run: RunSettings, attempt: int) -> Result:
    """Train from the newest checkpoint, or from the beginning, to the end."""
    torch.set_num_threads(1)
    world = init()
    SupervisorPipe().progress(pid=os.getpid())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(_FEATURES, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, _CLASSES)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # At the rate of one worker, stale updates diverge now and then, also in runs that nobody disturbs.
    strategy = parse(run.strategy)
    strategy.learning_rate(world.size).apply(optimizer)
    mesh = Mesh(data=world.size // run.tensor, tensor=run.tensor) if run.tensor > 1 else None
    job = distribute(model, optimizer, strategy, mesh=mesh)
    samples = NumberedSamples()
    batches = shard(DataLoader(samples, batch_size=_BATCH, shuffle=True), world=job.world)
    parts: tuple[Any, ...] = (batches, StepLR(optimizer, NUM_SAMPLES // (4 * _BATCH), 0.9))
    restored = job.restore(run.checkpoints, *parts)
    with Record(Path(run.folder), attempt, world.rank, restored.steps if restored else 0) as record:
        for _ in batches.epochs(run.epochs):
            for inputs, targets, numbers in batches:
                squared_error(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
                parts[1].step()
                # Before the checkpoint of this step: a step that a checkpoint holds has been recorded.
                if world.rank % run.tensor == 0:  # Ranks that split a model have the same samples.
                    record.append(job.steps, batches.epoch, numbers.tolist())
                job.checkpoint(run.checkpoints, *parts, every=run.every)
        steps = job.steps
        job.finish()
    with torch.no_grad():
        loss = squared_error(model(samples.inputs), samples.targets).item()
        return Result(steps, torch.cat([each.reshape(-1) for each in model.parameters()]).tolist(), loss)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of a batch."""
    return (outputs - targets).square().mean()
