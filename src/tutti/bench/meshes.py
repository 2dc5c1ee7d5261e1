"""Meshes as the planner prices them, beside the same jobs in virtual time, or in a lab."""

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

MODELS = ("mnist-mlp", "char-gpt", "cifar-quick")
RATES = ("100mbit", "1gbit", "10gbit")
WORKERS = (2, 4, 8)
SAMPLES = 64
"""Of all ranks together, a step: as many microbatches as any mesh of 8 needs divide what each replica has of them."""

_COMPUTE = Compute(flops="10gflops")
_LATENCY = "50us"


@dataclass(frozen=True)
class MeshCheck:
    """One mesh for one model on one link."""

    model: str
    rate: str
    prediction: MeshPrediction
    taken_s: float
    """A step, in virtual time or as measured."""

    @property
    def error(self) -> float:
        """How far the prediction is off."""
        return self.prediction.step_s / self.taken_s - 1

    def as_dict(self) -> dict[str, Any]:
        about = {"model": self.model, "rate": self.rate, "workers": self.prediction.mesh.size}
        return {**about, **self.prediction.as_dict(), "taken_s": self.taken_s, "error": self.error}


@dataclass(frozen=True)
class MeshComparison:
    """All meshes of so many workers for one model on one link, and what the planner makes of them."""

    rows: Sequence[MeshCheck]
    plan: MeshPlan

    @property
    def chosen(self) -> MeshCheck:
        return next(row for row in self.rows if row.prediction is self.plan.best)

    @property
    def fastest(self) -> MeshCheck:
        return min(self.rows, key=lambda row: row.taken_s)

    @property
    def times(self) -> float:
        """What the planner's first choice takes, in steps of the fastest."""
        return self.chosen.taken_s / self.fastest.taken_s

    def as_dict(self) -> dict[str, Any]:
        named = {
            "chosen": describe_mesh(self.chosen.prediction.mesh),
            "fastest": describe_mesh(self.fastest.prediction.mesh),
        }
        return {"rows": [row.as_dict() for row in self.rows], **named, "times": self.times}


def profile_parts(model: str, numbers: Iterable[int]) -> tuple[Profile, ModelParts]:
    """What the planner goes by, in virtual time: a step of a model, and all that ranks of meshes would do of it."""
    return simulate(_profile_parts, model, numbers, workers=1, cluster=Cluster(compute=_COMPUTE)).results[0]


def _profile_parts(model: str, numbers: Iterable[int]) -> tuple[Profile, ModelParts]:
    transport = init().transport
    with operator_clock.counting(transport):
        return _measured(recipe(model), numbers, TransportClock(transport))


def _measured(found: Recipe, numbers: Iterable[int], clock: Clock | None = None) -> tuple[Profile, ModelParts]:
    torch.manual_seed(0)
    model, batch = found.model(), found.example(SAMPLES)
    profile = profile_model(model, batch, loss=found.loss, optimizer=_optimizer(model), clock=clock, repeats=5)
    parts = ModelParts(model, batch[0]) if clock is None else ModelParts(model, batch[0], clock.now)
    for mesh in (mesh for number in numbers for mesh in meshes(number)):
        with suppress(ConfigError):  # The planner says so too.
            parts.stages(mesh.tensor, mesh.pipe)
    return profile, parts


def compare(
    model: str, rate: str, workers: int, tried: tuple[Profile, ModelParts], say: Callable[[str], Any]
) -> MeshComparison:
    """Price every mesh of so many workers, and simulate each."""
    profile, parts = tried
    cluster = Cluster(link=Link(rate, _LATENCY), compute=_COMPUTE)
    plan = plan_meshes(parts, profile, workers, cluster, total_samples=SAMPLES)
    rows = []
    for each in plan.predictions:
        say(f"{model}, {rate}, {describe_mesh(each.mesh)}")
        ends = simulate(train, model, each.mesh, workers=workers, cluster=cluster).results
        first, second = (max(of_ranks) for of_ranks in zip(*ends, strict=True))
        rows.append(MeshCheck(model, rate, each, second - first))
    return MeshComparison(rows, plan)


def train(model: str, mesh: Mesh) -> list[float]:
    """When each of two steps ended on this rank."""
    transport = init().transport
    step, job = _job(recipe(model), mesh)
    ends = []
    for _ in range(2):
        step()
        ends.append(transport.now())
    job.finish()
    return ends


def _job(found: Recipe, mesh: Mesh) -> tuple[Callable[[], Any], Job]:
    """A step on a mesh, of this replica's part of the samples."""
    torch.manual_seed(0)
    model, (x, y) = found.model(), found.example(SAMPLES // mesh.data)
    optimizer = _optimizer(model)
    job = distribute(model, optimizer, mesh=mesh, example=x)
    pipeline = job.pipeline(found.loss) if mesh.pipe > 1 else None

    def step() -> None:
        optimizer.zero_grad()
        if pipeline is not None:
            pipeline(x, y)
        else:
            found.loss(model(x), y).backward()
        optimizer.step()

    return step, job


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def in_lab(model: str, lab: Lab, rounds: int) -> MeshComparison:
    """Price every mesh of a lab's ranks from what was measured there, and time each."""
    (case, *_) = launch(_in_lab, model, str(lab.spec), rounds, lab=lab)
    return case


def _in_lab(model: str, name: str, rounds: int) -> MeshComparison:
    """On one rank, with all others at the same."""
    world, found = init(), recipe(model)
    torch.set_num_threads(1)
    rate, latency_s = measure_network(world.transport)["links"]["link"]
    profile, parts = _measured(found, [world.size])
    plan = plan_meshes(parts, profile, world.size, Cluster(link=Link(rate, latency_s)), total_samples=SAMPLES)
    rows = []
    for mesh in meshes(world.size):
        each = next((it for it in plan.predictions if it.mesh == mesh), None)
        if each is None:
            continue
        step, job = _job(found, mesh)
        taken = InterleavedTimer(rounds, round_s=0.5, most_repeats=5, total_s=30).medians(
            {"step": step}, world.transport
        )
        job.finish()
        rows.append(MeshCheck(model, name, each, taken["step"]))
    return MeshComparison(rows, plan)


def error_summary(rows: Sequence[MeshCheck]) -> tuple[float, float]:
    """The median and the worst of the errors, too fast or too slow."""
    errors = [abs(row.error) for row in rows]
    return statistics.median(errors), max(errors)
