"""`price_mesh`: predict a training step on a mesh."""

from dataclasses import dataclass
from typing import Any

from tutti.cluster import Cluster
from tutti.cost import Placement, Profile
from tutti.cost.scaled_profile import slowed, with_batch
from tutti.errors import ConfigError
from tutti.parallel import Mesh
from tutti.parallel.pipeline.schedules import actions_by_rank
from tutti.plan.mesh.axis_placement import placement_along
from tutti.plan.mesh.parts import ModelParts
from tutti.plan.mesh.pipeline_simulation import PipelineSimulation
from tutti.plan.mesh.rank_step import RankStep, ReplicaStep
from tutti.strategies import AllReduce, Strategy, as_strategy

_SCHEDULES = ("sequential", "gpipe", "1f1b")
"""Pipeline schedules that can be predicted."""


@dataclass(frozen=True, kw_only=True)
class MeshPrediction:
    """The predicted step of all ranks of a mesh. Where stages differ, seconds are of the busiest one."""

    mesh: Mesh
    strategy: Strategy
    """The strategy along `data`."""
    total_samples: int
    """Samples per step of all replicas."""
    step_s: float
    """Seconds of a step."""
    computing_s: float
    """Seconds of computation of a rank, with its optimiser."""
    tensor_s: float
    """Seconds of collectives between the ranks that split layers."""
    waiting_s: float
    """Seconds of waiting for other stages: the bubble, uneven stages, and messages between stages."""
    exposed_s: float
    """Seconds of the exchange along `data` that computation does not hide."""
    lasting_bytes: float
    """Bytes of parameters, buffers, gradients and optimiser state, on the rank that has most."""
    memory_bytes: float
    """Approximate bytes with the activations that the schedule keeps, on the rank that needs most."""

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all replicas."""
        return self.total_samples / self.step_s if self.step_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        shape = {axis: self.mesh.shape[axis] for axis in ("data", "tensor", "pipe")}
        rest = {key: value for key, value in vars(self).items() if key not in ("mesh", "strategy")}
        return {**shape, "strategy": str(self.strategy), **rest, "samples_per_s": self.samples_per_s}


def price_mesh(
    mesh: Mesh,
    parts: ModelParts,
    profile: Profile,
    cluster: Cluster,
    total_samples: int,
    strategy: Strategy | str | None = None,
) -> MeshPrediction:
    """Predict a step over `total_samples`.

    A batch goes through stages in microbatches, and gradients are exchanged after the last one. Without stages they are
    exchanged while backward runs.

    Args:
        parts: the parts of the model that ranks would have.
        profile: the measured step of the whole model.
        strategy: between replicas; all-reduce by default.

    Raises `ConfigError` for what a job would refuse.
    """
    strategy = AllReduce() if strategy is None else as_strategy(strategy)
    number = _num_microbatches(mesh, total_samples)
    # Rounded up: where samples cannot be divided evenly, the replica with most of them sets the length of a step.
    scaled = with_batch(profile, -(-total_samples // mesh.data))
    scaled = slowed(scaled, Placement.from_cluster(mesh.size, cluster).slowness)
    replica = ReplicaStep(mesh, cluster, scaled, number)
    # One stage per rank. Without stages any schedule means the same: one forward, one backward.
    orders = actions_by_rank(mesh.pipeline.schedule if mesh.pipe > 1 else "gpipe", mesh.pipe, 1, number)
    stage_parts = parts.stages(mesh.tensor, mesh.pipe)
    stages = [RankStep(part, parts, replica, actions) for part, actions in zip(stage_parts, orders, strict=True)]
    exposed = [stage.exposed_s(strategy) for stage in stages]
    busy = [stage.computing_s + stage.tensor_s + exposed_s for stage, exposed_s in zip(stages, exposed, strict=True)]
    step_s = busy[0]
    if mesh.pipe > 1:  # Ranks wait for each other in ways that no sum shows: simulate the schedule.
        times = [stage.time(exposed_s) for stage, exposed_s in zip(stages, exposed, strict=True)]
        step_s = PipelineSimulation(orders, times, placement_along("pipe", mesh, cluster).link).seconds()
    # The parts of the step are those of one rank, so that they add up to it: of the rank that waits least.
    busiest = max(range(len(stages)), key=busy.__getitem__)
    return MeshPrediction(
        mesh=mesh,
        strategy=strategy,
        total_samples=total_samples,
        step_s=step_s,
        computing_s=stages[busiest].computing_s,
        tensor_s=stages[busiest].tensor_s,
        waiting_s=max(0.0, step_s - busy[busiest]),
        exposed_s=exposed[busiest],
        lasting_bytes=max(stage.lasting_bytes for stage in stages),
        memory_bytes=max(stage.memory_bytes for stage in stages),
    )


def _num_microbatches(mesh: Mesh, total_samples: int) -> int:
    """Return the number of microbatches of a replica's batch; raise `ConfigError` for what a job would refuse."""
    if total_samples < mesh.data:
        raise ConfigError(f"{total_samples} samples leave some of {mesh.data} replicas without any.")
    if mesh.pipe == 1:
        return 1
    if mesh.pipeline.schedule not in _SCHEDULES:
        raise ConfigError(f"schedule '{mesh.pipeline.schedule}' is not priced, only {', '.join(_SCHEDULES)} are.")
    # The largest replica counts, where samples do not divide evenly: all others wait for it.
    samples, number = -(-total_samples // mesh.data), mesh.pipeline.microbatches or 2 * mesh.pipe
    if samples % number:
        raise ConfigError(
            f"the {samples} samples of a replica do not divide into the {number} microbatches of a pipeline: use a "
            "batch that does."
        )
    return number
