"""What a step takes on a mesh."""

from dataclasses import dataclass
from typing import Any

from tutti.cluster import Cluster
from tutti.cost import Placement, Profile
from tutti.cost.scaled_profile import slowed, with_batch
from tutti.errors import ConfigError
from tutti.parallel import Mesh
from tutti.parallel.pipeline.order import order
from tutti.plan.mesh.axes import place_along
from tutti.plan.mesh.parts import Parts
from tutti.plan.mesh.play import Clockwork
from tutti.plan.mesh.rank import RankStep, Share
from tutti.strategies import AllReduce, Strategy, as_strategy

_PLAYED = ("in-turn", "gpipe", "1f1b")


@dataclass(frozen=True, kw_only=True)
class MeshPrediction:
    """A step of all ranks of a mesh; where stages differ, seconds of the one that has most to do."""

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
    lasting_bytes: float
    """Parameters, buffers, gradients and the optimiser's state, of the rank that has most."""
    memory_bytes: float
    """About; with activations, as the schedule keeps them, of the rank that needs most."""

    @property
    def samples_per_s(self) -> float:
        return self.total_samples / self.step_s if self.step_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        shape = {axis: self.mesh.shape[axis] for axis in ("data", "tensor", "pipe")}
        rest = {key: value for key, value in vars(self).items() if key not in ("mesh", "strategy")}
        return {**shape, "strategy": str(self.strategy), **rest, "samples_per_s": self.samples_per_s}


def price_mesh(
    mesh: Mesh,
    parts: Parts,
    profile: Profile,
    cluster: Cluster,
    total_samples: int,
    strategy: Strategy | str | None = None,
) -> MeshPrediction:
    """What a step over `total_samples` takes: `parts` knows what each rank does of it, `profile` how long all takes.

    A batch goes through stages in microbatches, and gradients are exchanged when all are done; without stages, while
    backward runs.
    """
    strategy = AllReduce() if strategy is None else as_strategy(strategy)
    number = _num_microbatches(mesh, total_samples)
    replica = with_batch(profile, -(-total_samples // mesh.data))
    share = Share(mesh, cluster, slowed(replica, Placement.from_cluster(mesh.size, cluster).slowness), number)
    orders = order(mesh.pipeline.schedule if mesh.pipe > 1 else "gpipe", mesh.pipe, 1, number)
    found = parts.stages(mesh.tensor, mesh.pipe)
    stages = [RankStep(part, parts, share, actions) for part, actions in zip(found, orders, strict=True)]
    exposed = [stage.exposed_s(strategy) for stage in stages]
    busy = [stage.computing_s + stage.tensor_s + each for stage, each in zip(stages, exposed, strict=True)]
    step_s = busy[0]
    if mesh.pipe > 1:
        times = [stage.time(each) for stage, each in zip(stages, exposed, strict=True)]
        step_s = Clockwork(orders, times, place_along("pipe", mesh, cluster).link).seconds()
    most = max(range(len(stages)), key=busy.__getitem__)
    return MeshPrediction(
        mesh=mesh,
        strategy=strategy,
        total_samples=total_samples,
        step_s=step_s,
        computing_s=stages[most].computing_s,
        tensor_s=stages[most].tensor_s,
        waiting_s=max(0.0, step_s - busy[most]),
        exposed_s=exposed[most],
        lasting_bytes=max(stage.lasting_bytes for stage in stages),
        memory_bytes=max(stage.memory_bytes for stage in stages),
    )


def _num_microbatches(mesh: Mesh, total_samples: int) -> int:
    """Into how many a replica's batch is cut; what a job would refuse is refused."""
    if total_samples < mesh.data:
        raise ConfigError(f"{total_samples} samples leave some of {mesh.data} replicas without any.")
    if mesh.pipe == 1:
        return 1
    if mesh.pipeline.schedule not in _PLAYED:
        raise ConfigError(f"schedule '{mesh.pipeline.schedule}' is not priced, only {', '.join(_PLAYED)} are.")
    samples, number = -(-total_samples // mesh.data), mesh.pipeline.microbatches or 2 * mesh.pipe
    if samples % number:
        raise ConfigError(
            f"the {samples} samples of a replica do not divide into the {number} microbatches of a pipeline: use a "
            "batch that does."
        )
    return number
