"""`tutti bench checks`: a training step with and without the checks that run while training."""

import statistics
import time
from typing import Any

import torch

from tutti.bench.models import make_benchmark_model
from tutti.bench.training_steps import tutti_step
from tutti.collectives import all_gather_json
from tutti.job.checks import TrainingChecks
from tutti.launch import init
from tutti.launch.supervisor_pipe import SupervisorPipe
from tutti.replica import HookedReplica

_STEPS_PER_ROUND = 64
"""Steps between two readings of the clock."""

_OWN_ROUNDS, _OWN_STEPS = 7, 4096
"""Repetitions of the checks alone: each round has two comparisons between ranks."""

_WARM_UP_STEPS = 2100
"""Untimed steps, after which comparisons come at their usual interval."""


def measure(model: str, rounds: int) -> list[dict[str, Any]]:
    """Time rounds of steps with and without checks, in turn; the same on every rank. Collective.

    The ratio is the median of the rounds' ratios: both halves of a round are close in time, so that a disturbance
    mostly affects both. Half of the rounds begin with checks.
    """
    world, supervisor = init(), SupervisorPipe()
    # Other samples on every rank: equal batches are a mistake that the checks would report.
    torch.manual_seed(world.rank)
    step, job = tutti_step(make_benchmark_model(model, world.size), world)
    checks = job._replica.checks
    assert isinstance(checks, TrainingChecks)
    for _ in range(_WARM_UP_STEPS):
        step()
    checks.close()
    samples: dict[str, list[float]] = {"without": [], "with": []}
    for number in range(rounds):
        supervisor.progress(done=number, total=rounds, model=model)
        # Without first in even rounds, with first in odd ones, so that neither gains from its place.
        for name in sorted(samples, reverse=bool(number % 2)):
            if name == "with":
                checks.open()
            all_gather_json(0, world.transport)  # A barrier: all ranks start together.
            start = world.transport.now()
            for _ in range(_STEPS_PER_ROUND):
                step()
            seconds = max(all_gather_json(world.transport.now() - start, world.transport))
            samples[name].append(seconds / _STEPS_PER_ROUND)
            checks.close()
    checks.open()
    # The slowest rank counts, which the others wait for in a real step.
    own_s = max(all_gather_json(_own_seconds(checks, job._replica), world.transport))
    job.finish()
    ratios = [on / off for on, off in zip(samples["with"], samples["without"], strict=True)]
    seconds = {name: statistics.median(values) for name, values in samples.items()}
    ratio = statistics.median(ratios)
    return [{"model": model, "workers": world.size, "seconds": seconds, "ratio": ratio, "checks_s": own_s}]


def _own_seconds(checks: TrainingChecks, replica: HookedReplica) -> float:
    """Return the processor time of the checks of one step, comparisons included. Collective.

    Times of whole steps differ by more than that on a machine with other work; the processor time of one thread does
    not.
    """
    for slot in replica.slots:
        slot.tensor.grad, slot.arrived = slot.view, True  # As in a backward pass.
    rounds = []
    for _ in range(_OWN_ROUNDS):
        start = time.thread_time()
        for _ in range(_OWN_STEPS):
            checks.pass_started()
            checks.pass_finished()
            checks.before_step()
            checks.optimizer_steps(replica.optimizer)
        rounds.append((time.thread_time() - start) / _OWN_STEPS)
    for slot in replica.slots:
        slot.arrived = False
    # The least: whatever else the processor does makes a round longer, never shorter.
    return min(rounds)
