"""What a step takes on a mesh, by formula."""

from dataclasses import dataclass, replace
from typing import Any

from tutti.cluster import Cluster
from tutti.errors import ConfigError
from tutti.parallel import Mesh
from tutti.parallel.pipeline.cut import Span, balanced
from tutti.parallel.tensor.plan import TensorPlan
from tutti.plan.cost import price
from tutti.plan.loads import slowed, with_batch
from tutti.plan.mesh.part import LayerPart, parts_of
from tutti.plan.place import Place
from tutti.plan.profile import Gradient, Profile
from tutti.strategies import AllReduce, Strategy


@dataclass(frozen=True, kw_only=True)
class MeshPrediction:
    """A step of all ranks of a mesh; seconds of the slowest."""

    mesh: Mesh
    strategy: Strategy
    """Along `data`."""
    total_samples: int
    step_s: float
    computing_s: float
    """Of a rank, and its optimiser's step."""
    tensor_s: float
    """Sums and gathers between those who split layers."""
    waiting_s: float
    """For other stages: the bubble, a cut that cannot be even, and what travels between stages."""
    exposed_s: float
    """Exchange along `data` that is not hidden under computing."""
    memory_bytes: float
    """About; of the rank that needs most."""

    @property
    def samples_per_s(self) -> float:
        return self.total_samples / self.step_s if self.step_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        shape = {axis: self.mesh.shape[axis] for axis in ("data", "tensor", "pipe")}
        rest = {key: value for key, value in vars(self).items() if key not in ("mesh", "strategy")}
        return {**shape, "strategy": str(self.strategy), **rest, "samples_per_s": self.samples_per_s}


def price_mesh(
    mesh: Mesh,
    profile: Profile,
    tensor: TensorPlan,
    cluster: Cluster,
    total_samples: int,
    strategy: Strategy | None = None,
) -> MeshPrediction:
    """What a step over `total_samples` takes: `tensor` says how layers are split over `mesh.tensor` ranks.

    Ranks that split layers are neighbours, as a mesh places them. Stages are cut from the layers of the profile, and a
    batch goes through them in microbatches, "1f1b". Gradients are exchanged while the last microbatch goes back.
    """
    strategy = strategy or AllReduce()
    if total_samples < mesh.data:
        raise ConfigError(f"{total_samples} samples leave some of {mesh.data} replicas without any.")
    placed = Place.of(mesh.size, cluster)
    replica = slowed(with_batch(profile, -(-total_samples // mesh.data)), placed.slowness)
    parts = _with_rest(parts_of(replica, tensor, Place.of(mesh.tensor, cluster)), replica)
    spans = _cut(parts, mesh)
    microbatches = mesh.pipeline.microbatches or 2 * mesh.pipe
    stages = [parts[first:end] for first, end in spans]
    slowest = max(stages, key=_seconds)
    between_s = _between(stages, microbatches, placed)
    busy_s = (microbatches + mesh.pipe - 1) * max(_seconds(slowest) / microbatches, between_s)
    busy_s += 2 * (mesh.pipe - 1) * between_s
    most = max(stages, key=lambda stage: sum(part.gradient_bytes for part in stage))
    optimizer_s = replica.step_s * sum(part.gradient_bytes for part in most) / max(1, replica.gradient_bytes)
    exposed_s = _exposed(most, mesh, microbatches, replica, strategy, cluster)
    tensor_s = sum(part.talking_s for part in slowest)
    computing_s = _seconds(slowest) - tensor_s + optimizer_s
    return MeshPrediction(
        mesh=mesh,
        strategy=strategy,
        total_samples=total_samples,
        step_s=busy_s + optimizer_s + exposed_s,
        computing_s=computing_s,
        tensor_s=tensor_s,
        waiting_s=max(0.0, busy_s - _seconds(slowest)),
        exposed_s=exposed_s,
        memory_bytes=_memory(stages, replica, mesh, microbatches),
    )


def _seconds(stage: list[LayerPart]) -> float:
    return sum(part.seconds for part in stage)


def _with_rest(parts: list[LayerPart], profile: Profile) -> list[LayerPart]:
    """The same, with what is computed outside of layers laid over them: as much of it is split as of them."""
    seen = [(sum(layer.forward_s for layer in profile.layers)), sum(layer.backward_s for layer in profile.layers)]
    forward, backward = (
        max(1.0, whole / part) if part else 1.0
        for whole, part in zip((profile.forward_s, profile.backward_s), seen, strict=True)
    )
    return [replace(it, forward_s=forward * it.forward_s, backward_s=backward * it.backward_s) for it in parts]


def _cut(parts: list[LayerPart], mesh: Mesh) -> list[Span]:
    if mesh.pipe > len(parts):
        raise ConfigError(f"{mesh.pipe} stages need as many layers or more, and the profile has {len(parts)}.")
    found = balanced([part.seconds for part in parts], mesh.pipe)
    assert found is not None
    return found


def _between(stages: list[list[LayerPart]], microbatches: int, placed: Place) -> float:
    """Of what one stage gives another for a microbatch, at the slowest boundary."""
    if len(stages) == 1:
        return 0.0
    given = max(stage[-1].activation_bytes for stage in stages[:-1])
    link = placed.within if placed.num_hosts == 1 else placed.link
    return link.seconds(given / microbatches)


def _exposed(
    stage: list[LayerPart], mesh: Mesh, microbatches: int, replica: Profile, strategy: Strategy, cluster: Cluster
) -> float:
    """Exchange of a stage's gradients that its last microbatch does not hide.

    Ranks of a host that split layers share its link: together they send what one would that has the whole stage.
    """
    if mesh.data == 1:
        return 0.0
    per_host = cluster.ranks_per_host or 1
    here = min(mesh.tensor, per_host)
    last = 1 if mesh.pipe == 1 else microbatches
    gradients, ready_s = [], 0.0
    for part in reversed(stage):
        ready_s += part.backward_s / last
        if part.gradient_bytes:
            numel = max(1, round(here * part.gradient_bytes / 4))
            gradients.append(Gradient(name=part.name, shape=(numel,), num_bytes=4 * numel, ready_s=ready_s))
    backward_s = sum(part.backward_s for part in stage) / last
    own = replace(replica, gradients=tuple(gradients), layers=(), forward_s=0.0, backward_s=backward_s, step_s=0.0)
    apart = replace(cluster, ranks_per_host=max(1, per_host // here)) if cluster.hosts is None else cluster
    found = price(strategy, own, mesh.data, apart)
    return max(0.0, found.step_s - found.computing_s)


def _memory(stages: list[list[LayerPart]], replica: Profile, mesh: Mesh, microbatches: int) -> float:
    """Parameters, gradients and optimiser state as far as a rank has them, and activations of what is under way."""
    activations = sum(layer.activation_bytes for layer in replica.layers)
    lasting = max(replica.peak_bytes - activations, 2 * replica.gradient_bytes)
    under_way = min(mesh.pipe, microbatches) / microbatches if mesh.pipe > 1 else 1.0
    return max(
        lasting * sum(part.gradient_bytes for part in stage) / max(1, replica.gradient_bytes)
        + under_way * sum(part.activation_bytes for part in stage)
        for stage in stages
    )
