"""A small training run with elastic workers, which records the samples of every step and when it was completed."""

import json
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from tutti.bench.checkpoints.training import NUM_SAMPLES, NumberedSamples, squared_error
from tutti.data.shard import shard
from tutti.job.distribution import distribute
from tutti.launch import init
from tutti.launch.supervisor_pipe import SupervisorPipe

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


@dataclass(frozen=True)
class ElasticResult:
    """The end of a run on one worker."""

    steps: int
    parameters: list[float]
    learning_rate: float
    """At the end: a scheduler moves it in every step."""
    step_ends: list[float]
    """When each step was completed, on the machine's clock."""


def train(settings: ElasticSettings) -> ElasticResult:
    """Train to the end, whoever else is there."""
    torch.set_num_threads(1)
    world = init()
    torch.manual_seed(0)
    samples = NumberedSamples()
    model = nn.Sequential(
        nn.Linear(samples.inputs.shape[1], _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, samples.targets.shape[1])
    ).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    job = distribute(model, optimizer, settings.strategy)
    batches = shard(DataLoader(samples, batch_size=_BATCH, shuffle=True))
    scheduler = StepLR(optimizer, 10, 0.9)
    job.restore(Path(settings.folder) / "checkpoints", batches, scheduler)  # There are none: shows the scheduler.
    number = world.transport.world_rank
    step_ends = []
    SupervisorPipe().progress(pid=os.getpid())
    with open(Path(settings.folder) / f"worker-{number}.jsonl", "a", buffering=1) as record:
        for epoch in batches.epochs(settings.epochs):
            for inputs, targets, numbers in epoch:
                assert world.elastic is not None
                # Before the step: others may complete it with this worker's part, although it is killed meanwhile.
                record.write(
                    f"{json.dumps([world.elastic.member.number, job.steps, epoch.epoch, *numbers.tolist()])}\n"
                )
                time.sleep(settings.pause_s)
                before = job.steps
                squared_error(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                if job.steps > before:
                    step_ends.append(time.time())
    job.finish()
    parameters = torch.cat([each.reshape(-1) for each in model.parameters()]).tolist()
    return ElasticResult(job.steps, parameters, optimizer.param_groups[0]["lr"], step_ends)


def misused(folder: Path, num_epochs: int) -> int:
    """Return how many samples of all epochs were not used exactly once, under a strategy whose ranks step together.

    A step that was void was tried again, in a later generation: only the last one counts.
    """
    tries: dict[tuple[int, int], list[tuple[int, list[int]]]] = {}
    for path in folder.glob("worker-*.jsonl"):
        for line in path.read_text().splitlines():
            generation, step, epoch, *samples = json.loads(line)
            tries.setdefault((epoch, step), []).append((generation, samples))
    counts: Counter[tuple[int, int]] = Counter()
    for (epoch, _), found in tries.items():
        last = max(generation for generation, _ in found)
        counts.update((epoch, number) for generation, samples in found if generation == last for number in samples)
    wanted = {(epoch, number) for epoch in range(num_epochs) for number in range(NUM_SAMPLES)}
    return sum(counts[each] != 1 for each in wanted | counts.keys())
