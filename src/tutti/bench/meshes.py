"""`tutti bench meshes`: the planner's prediction for every mesh, beside simulated or measured step times."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from tutti.bench.interleaved import InterleavedTimer
from tutti.cluster import Cluster, Compute, Link
from tutti.errors import ConfigError
from tutti.job import Job, distribute
from tutti.launch import init, launch
from tutti.launch.lab.lab import Lab
from tutti.parallel import Mesh
from tutti.plan import Profile
from tutti.plan.auto.step_recorder import TransportClock
from tutti.plan.mesh import MeshPlan, MeshPrediction, ModelParts, plan_meshes
from tutti.plan.mesh.choose import describe_mesh, meshes
from tutti.plan.profile import profile as profile_model
from tutti.plan.profile.clock import Clock
from tutti.recipes import Recipe, recipe
from tutti.simulation import operator_clock
from tutti.simulation.runs.calibrate import measure_network
from tutti.simulation.runs.simulate import simulate

SAMPLES = 64
"""Samples per step over all ranks. Each replica's share divides into the microbatches of any mesh of 8 ranks."""

_COMPUTE = Compute(flops="10gflops")
"""Speed of every simulated rank."""
_LATENCY = "50us"
"""Latency of the simulated links."""


@dataclass(frozen=True)
class MeshCheck:
    """The predicted step time of one mesh, beside the simulated or measured one."""

    model: str
    rate: str
    prediction: MeshPrediction
    taken_s: float
    """Seconds per step, simulated or measured."""

    @property
    def error(self) -> float:
        """Relative error of the predicted step time."""
        return self.prediction.step_s / self.taken_s - 1

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and derived numbers as JSON types."""
        about = {"model": self.model, "rate": self.rate, "workers": self.prediction.mesh.size}
        return {**about, **self.prediction.as_dict(), "taken_s": self.taken_s, "error": self.error}


@dataclass(frozen=True)
class MeshComparison:
    """All meshes of a number of workers for one model on one link, and the plan for them."""

    rows: Sequence[MeshCheck]
    plan: MeshPlan

    @property
    def chosen(self) -> MeshCheck:
        """The planner's first choice."""
        return next(row for row in self.rows if row.prediction is self.plan.best)

    @property
    def fastest(self) -> MeshCheck:
        """The mesh with the shortest step."""
        return min(self.rows, key=lambda row: row.taken_s)

    @property
    def times(self) -> float:
        """Step time of the planner's first choice, relative to the fastest mesh."""
        return self.chosen.taken_s / self.fastest.taken_s

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and derived numbers as JSON types."""
        named = {
            "chosen": describe_mesh(self.chosen.prediction.mesh),
            "fastest": describe_mesh(self.fastest.prediction.mesh),
        }
        return {"rows": [row.as_dict() for row in self.rows], **named, "times": self.times}


def profile_parts(model: str, numbers: Iterable[int]) -> tuple[Profile, ModelParts]:
    """Profile a step of a model in virtual time, and the parts of it that ranks of meshes would compute."""
    return simulate(_profile_parts, model, numbers, workers=1, cluster=Cluster(compute=_COMPUTE)).results[0]


def _profile_parts(model: str, numbers: Iterable[int]) -> tuple[Profile, ModelParts]:
    """Do the part of `profile_parts` on the one simulated rank."""
    transport = init().transport
    # Virtual time advances by the operators that run, as it will in the simulation that predictions are compared with.
    with operator_clock.counting(transport):
        return _measured(recipe(model), numbers, TransportClock(transport))


def _measured(made: Recipe, numbers: Iterable[int], clock: Clock | None = None) -> tuple[Profile, ModelParts]:
    """Profile a model, and the parts of it that meshes of these numbers of ranks would compute."""
    torch.manual_seed(0)
    model, batch = made.model(), made.example(SAMPLES)
    profile = profile_model(model, batch, loss=made.loss, optimizer=_optimizer(model), clock=clock, repeats=5)
    parts = ModelParts(model, batch[0]) if clock is None else ModelParts(model, batch[0], clock.now)
    # All parts that meshes of these sizes need are profiled here, once for all links.
    for mesh in (mesh for number in numbers for mesh in meshes(number)):
        with suppress(ConfigError):  # The planner reports the reason.
            parts.stages(mesh.tensor, mesh.pipe)
    return profile, parts


def compare(
    model: str, rate: str, workers: int, profiled: tuple[Profile, ModelParts], show: Callable[[str], Any]
) -> MeshComparison:
    """Predict the step time of every mesh of so many workers, and simulate each."""
    profile, parts = profiled
    cluster = Cluster(link=Link(rate, _LATENCY), compute=_COMPUTE)
    plan = plan_meshes(parts, profile, workers, cluster, total_samples=SAMPLES)
    rows = []
    for prediction in plan.predictions:
        show(f"{model}, {rate}, {describe_mesh(prediction.mesh)}")
        ends = simulate(train, model, prediction.mesh, workers=workers, cluster=cluster).results
        # The first step has the start of the job in it, so the second is compared.
        first_s, second_s = (max(rank_ends) for rank_ends in zip(*ends, strict=True))
        rows.append(MeshCheck(model, rate, prediction, second_s - first_s))
    return MeshComparison(rows, plan)


def train(model: str, mesh: Mesh) -> list[float]:
    """Take two steps, and return the times at which they ended on this rank. Every rank of a simulation runs this."""
    transport = init().transport
    step, job = _job(recipe(model), mesh)
    ends = []
    for _ in range(2):
        step()
        ends.append(transport.now())
    job.finish()
    return ends


def _job(made: Recipe, mesh: Mesh) -> tuple[Callable[[], Any], Job]:
    """Return a function that takes one step on a mesh with this replica's share of the samples, and its job."""
    torch.manual_seed(0)
    model, (x, y) = made.model(), made.example(SAMPLES // mesh.data)
    optimizer = _optimizer(model)
    job = distribute(model, optimizer, mesh=mesh, example=x)
    pipeline = job.pipeline(made.loss) if mesh.pipe > 1 else None

    def step() -> None:
        optimizer.zero_grad()
        if pipeline is not None:
            pipeline(x, y)
        else:
            made.loss(model(x), y).backward()
        optimizer.step()

    return step, job


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum, whatever the recipe has: its step costs the same per element on every mesh."""
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def in_lab(model: str, lab: Lab, rounds: int) -> MeshComparison:
    """Predict the step time of every mesh of a lab's ranks from measurements there, and time each."""
    (case, *_) = launch(_in_lab, model, str(lab.spec), rounds, on=lab)
    return case


def _in_lab(model: str, name: str, rounds: int) -> MeshComparison:
    """Do the part of `in_lab` on one rank. Collective."""
    world, made = init(), recipe(model)
    torch.set_num_threads(1)  # The hosts of a lab share this machine's cores.
    rate, latency_s = measure_network(world.transport)["links"]["link"]
    profile, parts = _measured(made, [world.size])
    plan = plan_meshes(parts, profile, world.size, Cluster(link=Link(rate, latency_s)), total_samples=SAMPLES)
    rows = []
    # Not by predicted time, which differs a little between ranks: all ranks must run the same mesh at a time.
    for mesh in meshes(world.size):
        # None if the model or the batch does not allow this mesh.
        prediction = next((candidate for candidate in plan.predictions if candidate.mesh == mesh), None)
        if prediction is None:
            continue
        step, job = _job(made, mesh)
        measured = InterleavedTimer(rounds, round_s=0.5, most_repeats=5, total_s=30).medians(
            {"step": step}, world.transport
        )
        job.finish()
        rows.append(MeshCheck(model, name, prediction, measured["step"]))
    return MeshComparison(rows, plan)


def error_summary(rows: Sequence[MeshCheck]) -> tuple[float, float]:
    """Return the median and the largest absolute error."""
    errors = [abs(row.error) for row in rows]
    return statistics.median(errors), max(errors)
