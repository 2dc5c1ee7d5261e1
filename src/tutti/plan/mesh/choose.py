"""`plan_meshes`: predict every mesh of a number of workers, choose the fastest that fits into memory, and say why."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tutti.cluster import Cluster, format_size, format_time
from tutti.cost import Profile
from tutti.cost.placement import restricted_to
from tutti.errors import ConfigError
from tutti.parallel import Mesh
from tutti.plan.mesh.cost import MeshPrediction, price_mesh
from tutti.plan.mesh.parts import ModelParts

GAIN = 1.05
"""A mesh that splits the model must be this many times as fast as replicas that fit."""


@dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """Which mesh to use, and why."""

    predictions: tuple[MeshPrediction, ...]
    """The mesh to use; then others that fit, fastest first; then those that do not fit, smallest first."""
    memory_bytes: int | None
    """Memory of a rank in bytes; None without a limit."""
    refused: dict[str, str]
    """Meshes that the model or the batch does not allow, and why."""
    reason: str

    @property
    def best(self) -> MeshPrediction | None:
        """The mesh to use; None if none fits."""
        return next((prediction for prediction in self.predictions if fits(prediction, self.memory_bytes)), None)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        meshes = [
            {**prediction.as_dict(), "fits": fits(prediction, self.memory_bytes)} for prediction in self.predictions
        ]
        return {"memory_bytes": self.memory_bytes, "meshes": meshes, "refused": self.refused, "reason": self.reason}


def plan_meshes(
    parts: ModelParts,
    profile: Profile,
    workers: int,
    cluster: Cluster,
    *,
    total_samples: int | None = None,
    memory_bytes: int | None = None,
) -> MeshPlan:
    """Predict every mesh of `workers` workers for a step over `total_samples`, and choose one.

    Args:
        parts: the model with an example batch: `ModelParts(model, x)`.
        total_samples: samples per step of all replicas; by default the profile's, for each worker.
        memory_bytes: memory of a rank; a mesh that needs more is not chosen.
    """
    if workers < 1:
        raise ConfigError(f"workers must be 1 or more, got {workers}.")
    if memory_bytes is not None and memory_bytes < 1:
        raise ConfigError(f"memory_bytes must be 1 or more, got {memory_bytes}.")
    total = workers * profile.num_samples if total_samples is None else total_samples
    cluster = restricted_to(cluster, workers)
    cluster.place(workers)  # Raises `ConfigError` if the cluster has too few slots.
    predictions, refused = [], {}
    for mesh in meshes(workers):
        try:
            predictions.append(price_mesh(mesh, parts, profile, cluster, total))
        except ConfigError as error:  # One mesh that the model or the batch does not allow; others may be possible.
            refused[describe_mesh(mesh)] = str(error)
    if not predictions:
        # The first refusal is that of replicas alone, the mesh that asks least of the model.
        raise ConfigError(f"no mesh of {workers} workers is possible: {next(iter(refused.values()))}")
    ordered = sorted(predictions, key=lambda prediction: _order(prediction, memory_bytes))
    # Replicas leave the model as it is and allow every strategy: a split must be faster by `GAIN`.
    replicas = next((prediction for prediction in ordered if prediction.mesh.data == workers), None)
    if replicas is not None and fits(replicas, memory_bytes) and replicas.step_s <= GAIN * ordered[0].step_s:
        ordered = [replicas, *(prediction for prediction in ordered if prediction is not replicas)]
    return MeshPlan(
        predictions=tuple(ordered), memory_bytes=memory_bytes, refused=refused, reason=_reason(ordered, memory_bytes)
    )


def meshes(workers: int) -> Iterator[Mesh]:
    """Yield all meshes of `workers` ranks, those that split the model least first."""
    for tensor in _divisors(workers):
        for pipe in _divisors(workers // tensor):
            yield Mesh(data=workers // tensor // pipe, tensor=tensor, pipe=pipe)


def fits(prediction: MeshPrediction, memory_bytes: int | None) -> bool:
    """Whether the mesh needs no more memory than a rank has."""
    return memory_bytes is None or prediction.memory_bytes <= memory_bytes


def describe_mesh(mesh: Mesh) -> str:
    """Return the axes that have more than one rank, such as "data=2 x pipe=2"."""
    axes = [f"{axis}={size}" for axis in ("data", "tensor", "pipe") if (size := mesh.shape[axis]) > 1]
    return " x ".join(axes) or "one worker"


def _order(prediction: MeshPrediction, memory_bytes: int | None) -> tuple[bool, float]:
    """Return a sort key: meshes that fit by their time, then the others by their memory."""
    small_enough = fits(prediction, memory_bytes)
    return not small_enough, prediction.step_s if small_enough else prediction.memory_bytes


def _reason(ordered: list[MeshPrediction], memory_bytes: int | None) -> str:
    """Return the recommendation in words: whether to train, whether to split, and what the alternative costs."""
    best = ordered[0]  # If this one does not fit, none does, and it is the one that needs least memory.
    if memory_bytes is not None and not fits(best, memory_bytes):
        return (
            f"Do not train this on {best.mesh.size} workers of {format_size(memory_bytes)}: no mesh of them fits. "
            f"{describe_mesh(best.mesh)} needs least, {format_size(round(best.memory_bytes))} each. Use more workers, "
            "smaller batches, or more memory."
        )
    replicas = next((prediction for prediction in ordered if prediction.mesh.data == prediction.mesh.size), None)
    spent = f"a step takes {format_time(best.step_s)}"
    if best is replicas:
        replicated = describe_mesh(best.mesh)
        return f"Do not split the model: with replicas alone ({replicated}) {spent}, and no mesh is much faster."
    first = f"Use {describe_mesh(best.mesh)}: {spent}"
    if replicas is None or best.mesh.size == 1:
        return f"{first}."
    if not fits(replicas, memory_bytes):
        return f"{first}. Replicas of the whole model would need {format_size(round(replicas.memory_bytes))} each."
    return f"{first}, and with replicas alone {format_time(replicas.step_s)}."


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
