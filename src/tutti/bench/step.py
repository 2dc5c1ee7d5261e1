"""`tutti bench step`: a training step alone, under DDP, under Tutti and with a flat Open MPI all-reduce."""

import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tutti.bench.models import BenchmarkModel, make_benchmark_model
from tutti.bench.training_steps import ddp_step, make_step, solo_step, torch_group, tutti_step
from tutti.bench.under_mpi import communicator
from tutti.collectives import all_gather_json
from tutti.launch import init
from tutti.launch.supervisor_pipe import SupervisorPipe
from tutti.world import World

ROUND_SECONDS = 0.1
"""A round repeats each candidate's step for about this long."""

_WARM_UP_STEPS = 3
"""Untimed steps of each candidate: DDP rebuilds its buckets after the first, and connections open."""


@dataclass(frozen=True)
class StepTimes:
    """Median seconds per step of each candidate ("solo", "ddp", "mpi", "tutti"), for one model."""

    model: str
    num_parameters: int
    workers: int
    seconds: dict[str, float]

    def speedup_over(self, candidate: str) -> float | None:
        """Return the speed of Tutti relative to `candidate`; None if that was not timed."""
        return self.seconds[candidate] / self.seconds["tutti"] if candidate in self.seconds else None

    @property
    def efficiency(self) -> float:
        """Tutti's speed as a fraction of the speed without any communication."""
        return self.seconds["solo"] / self.seconds["tutti"]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and derived numbers as JSON types."""
        return {
            "model": self.model,
            "num_parameters": self.num_parameters,
            "workers": self.workers,
            "seconds": self.seconds,
            "times_ddp": self.speedup_over("ddp"),
            "times_mpi": self.speedup_over("mpi"),
            "efficiency": self.efficiency,
        }


def measure(models: list[str], rounds: int) -> list[dict[str, Any]]:
    """Time every model on all ranks. Returns one `StepTimes` dict per model, the same on every rank."""
    world, supervisor = init(), SupervisorPipe()
    torch.manual_seed(0)
    rows = []
    with torch_group(world):
        for number, name in enumerate(models):
            supervisor.progress(done=number, total=len(models), model=name)
            rows.append(_measure_model(name, world, rounds).as_dict())
    return rows


def _measure_model(name: str, world: World, rounds: int) -> StepTimes:
    """Time a step of one model by every means that is there: alone, DDP, Tutti, and MPI under mpirun."""
    benchmark = make_benchmark_model(name, world.size)
    num_parameters = sum(p.numel() for p in benchmark.model.parameters())
    steps: dict[str, Callable[[], Any]] = {"solo": solo_step(benchmark), "ddp": ddp_step(benchmark)}
    steps["tutti"], job = tutti_step(benchmark, world)
    # Only under mpirun, where these processes are ranks of MPI as well.
    if world.size > 1 and (mpi_world := communicator()) is not None:
        steps["mpi"] = _mpi_step(benchmark, mpi_world)
    seconds = _median_seconds(steps, world, rounds)
    job.finish()
    return StepTimes(name, num_parameters, world.size, seconds)


def _median_seconds(steps: dict[str, Callable[[], Any]], world: World, rounds: int) -> dict[str, float]:
    """Time the candidates in turn. Returns the median over rounds of the slowest rank's seconds per step."""
    now = world.transport.now
    for step in steps.values():
        for _ in range(_WARM_UP_STEPS):
            step()
    # One number of steps for all candidates, by one step of Tutti, the same on all ranks.
    start = now()
    steps["tutti"]()
    per_round = max(1, int(ROUND_SECONDS / max(_slowest(now() - start, world), 1e-5)))
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        # Each round starts with another candidate, so that none always follows the same one.
        names = list(steps)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            _slowest(0.0, world)  # A barrier: all ranks start together.
            start = now()
            for _ in range(per_round):
                steps[name]()
            samples[name].append(_slowest(now() - start, world) / per_round)
    return {name: statistics.median(values) for name, values in samples.items()}


def _slowest(seconds: float, world: World) -> float:
    return max(all_gather_json(seconds, world.transport))


def _mpi_step(benchmark: BenchmarkModel, mpi_world: Any) -> Callable[[], None]:
    """Make a step with one flat MPI all-reduce after backward, as a careful user of mpi4py would write it."""
    from mpi4py import MPI

    model = copy.deepcopy(benchmark.model)
    parameters = list(model.parameters())
    # All gradients in one tensor: one all-reduce, and no latency for each parameter.
    flat = torch.empty(sum(p.numel() for p in parameters))
    views = [
        part.view(p.shape) for part, p in zip(flat.split([p.numel() for p in parameters]), parameters, strict=True)
    ]

    def all_reduce() -> None:
        torch._foreach_copy_(views, [p.grad for p in parameters if p.grad is not None])
        mpi_world.Allreduce(MPI.IN_PLACE, flat.numpy())
        flat.div_(mpi_world.size)
        # The mean need not be copied back: gradients become views of the flat tensor.
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view

    return make_step(model, benchmark, all_reduce)[0]
