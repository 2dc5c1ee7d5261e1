"""A small training run with elastic workers, in which something happens to some of them.

Each worker records the samples of every step, so that it can be said which ones were used (`records`).
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from tutti.bench.checkpoints.training import NumberedSamples, squared_error
from tutti.bench.elastic.events import EVENTS, Newcomers
from tutti.bench.elastic.records import StepRecord
from tutti.data.shard import shard
from tutti.job.distribution import distribute
from tutti.launch import init
from tutti.launch.supervisor_pipe import SupervisorPipe
from tutti.strategies import parse

_BATCH, _HIDDEN = 5, 64


@dataclass(frozen=True)
class ElasticSettings:
    """A run."""

    strategy: str
    folder: str
    """Where its records are."""
    epochs: int
    pause_s: float = 0.0
    """How long a worker pauses in every step, in place of computing."""
    event: str = ""
    """What happens to the victims: a name in `EVENTS`. Nothing if empty."""
    victims: tuple[int, ...] = ()
    step: int = 10
    """The step of a victim in which that happens."""
    in_step: bool = False
    """Whether that is after the backward pass, and not before the forward pass."""
    newcomers: int = 0
    """Number of workers that come later. Nobody ends before they are there."""


@dataclass(frozen=True)
class ElasticResult:
    """The end of a run on one worker."""

    steps: int
    parameters: list[float]
    learning_rate: float
    """At the end: a scheduler moves it in every step."""
    step_ends: list[float]
    """When each step was completed, on the machine's clock."""
    size: int
    """Number of workers at the end."""
    voided_steps: int
    lost_samples: int
    """As `job.metrics.changes` has them."""
    kind: str
    """What a step of the strategy is, as `records` wants to know it."""


def train(settings: ElasticSettings) -> ElasticResult:
    """Train to the end, with any other members."""
    torch.set_num_threads(1)
    world = init()
    torch.manual_seed(0)
    samples = NumberedSamples()
    model = nn.Sequential(
        nn.Linear(samples.inputs.shape[1], _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, samples.targets.shape[1])
    ).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    strategy = parse(settings.strategy)
    if not strategy.exact:  # At the rate of one worker, stale updates diverge now and then.
        strategy.learning_rate(world.size).apply(optimizer)
    assert world.elastic is not None
    newcomers = Newcomers(settings.newcomers, Path(settings.folder), world.elastic)
    newcomers.come()
    job = distribute(model, optimizer, strategy)
    batches = shard(DataLoader(samples, batch_size=_BATCH, shuffle=True))
    scheduler = StepLR(optimizer, 10, 0.9)
    job.restore(Path(settings.folder) / "checkpoints", batches, scheduler)  # There are none: shows the scheduler.
    number = world.transport.world_rank
    is_victim, event = number in settings.victims, EVENTS.get(settings.event)
    step_ends, kind = [], ""
    SupervisorPipe().progress(pid=os.getpid())
    with StepRecord(Path(settings.folder), number) as record:
        for epoch in batches.epochs(settings.epochs):  # An epoch may have samples left of the one before.
            for inputs, targets, numbers in epoch:
                before, is_now = job.steps, is_victim and job.steps == settings.step
                # Before the step: others may complete it with this worker's part, although it is killed meanwhile.
                used = numbers.tolist() if world.sample_counts.num_samples > 0 else []
                record.step(world.elastic.member.number, job.steps, batches._cursor.epoch, used)
                time.sleep(settings.pause_s)
                newcomers.await_from(settings.step, job.steps)
                if event is not None and is_now and not settings.in_step:
                    event()
                # As at the first step: with a host less, servers may go on in shared memory.
                kind = kind or record_kind(job._exchange.equal_after_steps, job._exchange.tolerates_loss)
                squared_error(model(inputs), targets).backward()
                if event is not None and is_now and settings.in_step:
                    event()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                if job.steps > before:
                    step_ends.append(time.time())
                else:
                    record.void()
    changes = job.metrics.changes
    job.finish()
    parameters = torch.cat([each.reshape(-1) for each in model.parameters()]).tolist()
    return ElasticResult(
        job.steps,
        parameters,
        optimizer.param_groups[0]["lr"],
        step_ends,
        world.size,
        changes.voided_steps,
        changes.lost_samples,
        kind,
    )


def record_kind(equal_after_steps: bool, tolerates_loss: bool) -> str:
    """Return what a step is: "together" for all ranks at once, "alone" for one rank, "block" for local ones."""
    if equal_after_steps:
        return "together"
    return "alone" if tolerates_loss else "block"
