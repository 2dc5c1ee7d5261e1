"""The cost of being able to lose a worker, while none is lost: processor time of what an elastic run does in a step."""

import time
from dataclasses import dataclass

import torch

from tutti.bench.models import make_benchmark_model
from tutti.bench.training_steps import tutti_step
from tutti.collectives import all_gather_json
from tutti.launch import init

_WARM_UP, _STEPS, _CALLS = 50, 300, 5000


@dataclass(frozen=True)
class ReadinessCost:
    """What a worker does in every step to be ready for a loss."""

    model: str
    step_s: float
    """A step, by the clock."""
    ready_s: float
    """Processor time of what is done between two batches."""

    @property
    def share(self) -> float:
        """The part of a step."""
        return self.ready_s / self.step_s


def measure(model: str) -> ReadinessCost:
    """Measure among the workers of this run, which is elastic. Collective."""
    torch.set_num_threads(1)
    world = init()
    torch.manual_seed(world.rank)
    step, job = tutti_step(make_benchmark_model(model, world.size), world)
    for _ in range(_WARM_UP):
        step()
    start = time.perf_counter()
    for _ in range(_STEPS):
        step()
    step_s = max(all_gather_json((time.perf_counter() - start) / _STEPS, world.transport))
    assert world.elastic is not None
    regrouping = world.elastic.regrouping
    assert regrouping is not None
    start = time.thread_time()
    for _ in range(_CALLS):
        regrouping.boundary()
    ready_s = max(all_gather_json((time.thread_time() - start) / _CALLS, world.transport))
    job.finish()
    return ReadinessCost(model, step_s, ready_s)
