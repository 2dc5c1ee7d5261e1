"""`tutti bench auto`: steps under the strategy that `Auto` chooses, beside DDP, and the cost of choosing."""

import copy
from dataclasses import dataclass
from typing import Any

import torch

from tutti.bench.interleaved import Candidates, InterleavedTimer
from tutti.bench.models import make_benchmark_model
from tutti.bench.training_steps import ddp_step, make_step, solo_step, torch_group
from tutti.collectives import all_gather_json
from tutti.job import distribute
from tutti.launch import init
from tutti.launch.supervisor_pipe import SupervisorPipe
from tutti.plan.auto import Auto, PlanStatus
from tutti.strategies import AllReduce

_MOST_STEPS = 100
"""Limit of the steps in which `Auto` should have decided."""


@dataclass(frozen=True)
class AutoReport:
    """Step times of one model, and the choice of `Auto` for it."""

    model: str
    workers: int
    seconds: dict[str, float]
    """Seconds per step: without exchange ("solo"), under DDP, all-reduce ("native") and the choice of Auto ("auto")."""
    chosen: str
    """The strategy that `Auto` has chosen, as text."""
    steps: int
    """Steps until `Auto` had decided."""
    planning_s: float
    """Time of those steps beyond what they take under the choice."""

    @property
    def times_ddp(self) -> float:
        """Speed of the choice relative to DDP."""
        return self.seconds["DDP"] / self.seconds["auto"]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and derived numbers as JSON types."""
        return {**vars(self), "times_ddp": self.times_ddp}


def measure(model: str, rounds: int) -> AutoReport:
    """Train until Auto has decided, then time its steps interleaved with the others, on all ranks."""
    world, supervisor = init(), SupervisorPipe()
    torch.manual_seed(0)
    benchmark = make_benchmark_model(model, world.size)
    auto_model, native_model = copy.deepcopy(benchmark.model), copy.deepcopy(benchmark.model)
    candidates: Candidates = {"solo": solo_step(benchmark)}
    candidates["native"], native_optimizer = make_step(native_model, benchmark)
    candidates["auto"], auto_optimizer = make_step(auto_model, benchmark)
    now = world.transport.now
    with torch_group(world), distribute(native_model, native_optimizer, AllReduce(), world=world):
        candidates["DDP"] = ddp_step(benchmark)
        # Warm up. `Auto` needs none: the steps until it has decided are its warm-up.
        for _ in range(3):
            for name in ("solo", "native", "DDP"):
                candidates[name]()
        supervisor.progress(doing="auto is planning")
        with distribute(auto_model, auto_optimizer, Auto(), world=world) as job:
            start_s, steps = now(), 0
            while steps < _MOST_STEPS and not _settled(job.metrics.strategy.get("planned")):
                candidates["auto"]()
                steps += 1
            # Of the slowest rank: its planning makes the others wait.
            spent_s = max(all_gather_json(now() - start_s, world.transport))
            timer = InterleavedTimer(rounds, round_s=1.0, most_repeats=200, total_s=90.0)
            seconds = timer.medians(candidates, world.transport, lambda text: supervisor.progress(doing=text))
            planned = job.metrics.strategy.get("planned")
    # Planning: all time until the decision, without what as many steps take under the choice.
    return AutoReport(
        model, world.size, seconds, planned.chosen if planned else "", steps, spent_s - steps * seconds["auto"]
    )


def _settled(planned: PlanStatus | None) -> bool:
    return planned is not None and planned.settled
