"""The cost of a new worker for those that train already, and the time until it takes part."""

import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

from tutti.bench.models import make_benchmark_model
from tutti.data.shard import shard
from tutti.errors import WorkerFailed
from tutti.job.distribution import distribute
from tutti.launch import init
from tutti.launch.chaos import Chaos
from tutti.launch.elastic_run import ElasticRun
from tutti.launch.local import supervise

MODELS = ("mlp-0.1M", "mlp-1.9M", "mlp-20M")
TRANSPORTS = {"shared_memory": "native", "sockets": "ring"}
"""Transports, and the strategy over each."""
_WORKERS, _BATCH, _SAMPLES, _STEPS_AFTER = 2, 16, 100_000, 12


@dataclass(frozen=True)
class WorkerTimes:
    """What one worker has seen, by the machine's clock."""

    is_new: bool
    started_at: float
    distributed_at: float
    """When the model was distributed: a new worker then prepares its data, while the others train."""
    step_ends: list[float] = field(repr=False)


@dataclass(frozen=True)
class JoinCost:
    """What a join has cost."""

    model: str
    transport: str
    step_s: float
    """Median step of the larger world."""
    lost_s: float
    """By how much the first of these steps was longer, on the worker where it was longest."""
    joined_s: float
    """From when the new worker had distributed its model to the end of its first step."""

    @property
    def lost_steps(self) -> float:
        """The time that was lost, in steps."""
        return self.lost_s / self.step_s


def train(model: str, strategy: str) -> WorkerTimes:
    """Train with Adam, until some steps after another worker has joined."""
    started_at = time.time()
    torch.set_num_threads(1)
    world = init()
    torch.manual_seed(0)
    benchmark = make_benchmark_model(model, _WORKERS, _BATCH)
    optimizer = Adam(benchmark.model.parameters(), lr=1e-5)
    job = distribute(benchmark.model, optimizer, strategy)
    distributed_at = time.time()
    inputs, targets = benchmark.batch
    numbers = TensorDataset(torch.arange(_SAMPLES))
    batches = shard(DataLoader(numbers, batch_size=_BATCH, shuffle=True))
    ends: list[float] = []
    num_after = 0
    for epoch in batches.epochs(1_000):
        for _ in epoch:
            benchmark.loss(benchmark.model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            ends.append(time.time())
            num_after += world.size > _WORKERS
            if num_after >= _STEPS_AFTER:
                break
        if num_after >= _STEPS_AFTER:
            break
    assert world.elastic is not None
    is_new = world.elastic.has_joined
    job.finish()
    return WorkerTimes(is_new, started_at, distributed_at, ends)


def measure(model: str, transport: str) -> JoinCost:
    """Start a run, let another worker join it, and return what that has cost."""
    # Counted from when all train: they have taken some steps then, also those of a large model.
    chaos = Chaos.parse("join at 2s")
    workers = ElasticRun(minimum=1, maximum=_WORKERS + 1, start=_WORKERS, chaos=chaos)
    run = supervise(train, (model, TRANSPORTS[transport]), workers, {"TUTTI_TRANSPORT": transport})
    found = [each for each in run.run() if each is not None]
    there, new = ([each for each in found if each.is_new == is_new] for is_new in (False, True))
    if not there or not new:
        raise WorkerFailed(_WORKERS, "did not join")
    lost_s, step_s = 0.0, 0.0
    for each in there:
        # The step in which the ranks have changed, and those after it.
        first, *later = [end - begin for begin, end in pairwise(each.step_ends)][-_STEPS_AFTER:]
        step_s = max(step_s, statistics.median(later))
        lost_s = max(lost_s, first - statistics.median(later))
    return JoinCost(model, transport, step_s, max(0.0, lost_s), new[0].step_ends[0] - new[0].distributed_at)
