"""`Auto` beside DDP: what its choice is worth once it is made, and what making it cost."""

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

MOST_STEPS = 100
"""In which it should have settled."""


@dataclass(frozen=True)
class AutoReport:
    """Of one model in one place."""

    model: str
    workers: int
    seconds: dict[str, float]
    """A step without exchange ("solo"), and under DDP, plain all-reduce ("native") and what Auto chose ("auto")."""
    chosen: str
    steps: int
    """Until nothing was watched or tried any more."""
    planning_s: float
    """Beyond what as many steps take under the choice."""

    @property
    def times_ddp(self) -> float:
        return self.seconds["DDP"] / self.seconds["auto"]

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "times_ddp": self.times_ddp}


def measure(model: str, rounds: int) -> AutoReport:
    """Train until Auto has settled, and then time its steps and others' in turns, on this rank and its peers."""
    world, supervisor = init(), SupervisorPipe()
    torch.manual_seed(0)
    case = make_benchmark_model(model, world.size)
    chooses, plain = copy.deepcopy(case.model), copy.deepcopy(case.model)
    ways: Candidates = {"solo": solo_step(case)}
    ways["native"], optimizer = make_step(plain, case)
    ways["auto"], other = make_step(chooses, case)
    now = world.transport.now
    with torch_group(world), distribute(plain, optimizer, AllReduce(), world=world):
        ways["DDP"] = ddp_step(case)
        for _ in range(3):
            for name in ("solo", "native", "DDP"):
                ways[name]()
        supervisor.progress(doing="auto plans")
        with distribute(chooses, other, Auto(), world=world) as job:
            start_s, steps = now(), 0
            while steps < MOST_STEPS and not _settled(job.metrics.strategy.get("planned")):
                ways["auto"]()
                steps += 1
            spent_s = max(all_gather_json(now() - start_s, world.transport))
            turns = InterleavedTimer(rounds, round_s=1.0, most_repeats=200, total_s=90.0)
            seconds = turns.medians(ways, world.transport, lambda text: supervisor.progress(doing=text))
            planned = job.metrics.strategy.get("planned")
    return AutoReport(
        model, world.size, seconds, planned.chosen if planned else "", steps, spent_s - steps * seconds["auto"]
    )


def _settled(planned: PlanStatus | None) -> bool:
    return planned is not None and planned.settled
