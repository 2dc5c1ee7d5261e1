"""Goodput of a recipe's training while a worker is killed every minute, and replaced.

How it works. Workers train without end; chaos kills one of them every minute, by the clock of the launcher, and never
the first one, which writes down when each step was completed. A step is the same work whatever the number of workers:
a global batch. Each minute begins with a kill. Its goodput is the number of its steps, divided by what it would have
been at the rate of its last `_QUIET_S` seconds, when everybody is back. So other work on the machine, which comes and
goes, counts little. A minute without a kill comes first and is measured in the same way, as a control.
"""

import io
import statistics
from bisect import bisect_left
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from tutti.data.shard import shard
from tutti.job.distribution import distribute
from tutti.launch import init
from tutti.launch.chaos import Chaos
from tutti.launch.diagnosis_line import DiagnosisLine
from tutti.launch.elastic_run import ElasticRun
from tutti.launch.local import supervise
from tutti.recipes import recipe
from tutti.recipes.data import collate

RECIPE, WORKERS = "mnist-mlp", 8
_QUIET_S = 40.0
"""The end of each minute, in which the lost worker has long been replaced."""
_SETTLE_S = 10.0
"""All workers train, before the first minute begins."""
_LOOK_EVERY = 50
"""Steps after which workers look together whether the time is over."""


@dataclass
class GoodputResult:
    """How much of its work a run did while workers were killed."""

    minute_s: float
    minutes: list[float] = field(default_factory=list)
    """Goodput of each minute that began with a kill."""
    control: float = float("nan")
    """The same of a minute without."""
    stalls_s: list[float] = field(default_factory=list)
    """The longest time without a step after each kill."""
    step_s: float = float("nan")
    """A step, in the median."""
    kills: int = 0
    replaced: int = 0
    """Workers that have come to the end in the place of others."""

    @property
    def goodput(self) -> float:
        """Mean of the minutes with a kill."""
        return statistics.mean(self.minutes) if self.minutes else float("nan")


def train(duration_s: float, folder: Path | None) -> list[float]:
    """Train for some seconds with the data in a folder; return when each step was completed, from the first on."""
    torch.set_num_threads(1)
    world = init()
    torch.manual_seed(0)
    chosen = recipe(RECIPE)
    model = chosen.model()
    optimizer = chosen.optimizer(model)
    job = distribute(model, optimizer)
    data = chosen.data(folder).train
    batches = shard(DataLoader(data, batch_size=chosen.batch_size // WORKERS, shuffle=True, collate_fn=collate))
    begin_s, ends, over = world.transport.now(), list[float](), False
    for epoch in batches.epochs(1_000_000):
        for x, y in epoch:
            chosen.loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            ends.append(world.transport.now() - begin_s)
            if job.steps % _LOOK_EVERY == 0 and job.reduce(float(ends[-1]), "max") > duration_s:
                over = True
                break
        if over:
            break
    job.finish()
    return ends


def measure(num_minutes: int, folder: Path | None, minute_s: float = 60.0) -> GoodputResult:
    """Train with the data in a folder, and with a kill every minute, after one minute without."""
    recipe(RECIPE).data(folder)  # A mistake is one message here.
    found, said = GoodputResult(minute_s), io.StringIO()
    first_s = _SETTLE_S + minute_s
    kills_s = [first_s + number * minute_s for number in range(num_minutes)]
    clauses = [f"kill {1 + number % (WORKERS - 1)} at {at:g}s" for number, at in enumerate(kills_s)]
    elastic = ElasticRun(minimum=1, maximum=WORKERS, restarts=num_minutes, chaos=Chaos.parse("; ".join(clauses)))
    supervisor = supervise(train, (first_s + num_minutes * minute_s, folder), elastic, {"OMP_NUM_THREADS": "1"})
    supervisor.diagnosis = DiagnosisLine(said)
    with redirect_stderr(said):
        results = supervisor.run()
    ends = results[0]
    found.kills = sum(result is None for result in results)
    found.replaced = sum(result is not None for result in results[WORKERS:])
    gaps = [after - before for before, after in pairwise(ends)]
    found.step_s = statistics.median(gaps)
    found.control = goodput(ends, _SETTLE_S, minute_s)
    for at in kills_s:
        found.minutes.append(goodput(ends, at, minute_s))
        found.stalls_s.append(max(gaps[bisect_left(ends, at) - 1 : bisect_left(ends, at + minute_s) - 1]))
    return found


def goodput(ends: list[float], begin_s: float, minute_s: float) -> float:
    """Return the steps of a minute, divided by what they would have been at the rate of its end."""
    quiet_s = minute_s * _QUIET_S / 60

    def rate(since_s: float, until_s: float) -> float:
        return (bisect_left(ends, until_s) - bisect_left(ends, since_s)) / (until_s - since_s)

    end_s = begin_s + minute_s
    return rate(begin_s, end_s) / rate(end_s - quiet_s, end_s)
