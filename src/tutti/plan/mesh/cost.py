"""What a step takes on a mesh."""

from dataclasses import dataclass, replace
from typing import Any

from tutti.cluster import Cluster
from tutti.errors import ConfigError
from tutti.parallel import Mesh
from tutti.parallel.pipeline.order import order
from tutti.plan.cost import formula_of
from tutti.plan.loads import slowed, with_batch
from tutti.plan.mesh.axes import place_along
from tutti.plan.mesh.parts import Parts, StagePart
from tutti.plan.mesh.play import Clockwork, StageTime
from tutti.plan.mesh.talk import talking_s
from tutti.plan.place import Place
from tutti.plan.profile import Profile
from tutti.strategies import AllReduce, Strategy


@dataclass(frozen=True, kw_only=True)
class MeshPrediction:
    """A step of all ranks of a mesh; seconds of the stage that has most to do."""

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
    parts: Parts,
    profile: Profile,
    cluster: Cluster,
    total_samples: int,
    strategy: Strategy | None = None,
) -> MeshPrediction:
    """What a step over `total_samples` takes: `parts` knows what each rank would do, `profile` how long all of it takes.

    A batch goes through stages in microbatches, and their gradients are exchanged when all are done; without stages,
    while backward runs.
    """
    strategy = strategy or AllReduce()
    if total_samples < mesh.data:
        raise ConfigError(f"{total_samples} samples leave some of {mesh.data} replicas without any.")
    samples = -(-total_samples // mesh.data)
    microbatches = (mesh.pipeline.microbatches or 2 * mesh.pipe) if mesh.pipe > 1 else 1
    if samples % microbatches:
        raise ConfigError(
            f"the {samples} samples of a replica do not divide into {microbatches} microbatches. "
            f"Use a batch that does, or Pipeline(microbatches=...)."
        )
    replica = slowed(with_batch(profile, samples), Place.of(mesh.size, cluster).slowness)
    stages = [
        _RankStep(part, parts, replica, mesh, cluster, samples // microbatches, microbatches)
        for part in parts.stages(mesh.tensor, mesh.pipe)
    ]
    exposed = [stage.exposed_s(strategy) for stage in stages]
    busy = [stage.busy_s + each for stage, each in zip(stages, exposed, strict=True)]
    step_s = busy[0]
    if mesh.pipe > 1:
        orders = order(mesh.pipeline.schedule, mesh.pipe, 1, microbatches)
        times = [
            StageTime(it.forward_s, it.backward_s, it.gives, each + it.optimizer_s)
            for it, each in zip(stages, exposed, strict=True)
        ]
        step_s = Clockwork(orders, times, place_along("pipe", mesh, cluster).link).seconds()
    most = max(range(len(stages)), key=lambda number: busy[number])
    return MeshPrediction(
        mesh=mesh,
        strategy=strategy,
        total_samples=total_samples,
        step_s=step_s,
        computing_s=stages[most].computing_s,
        tensor_s=stages[most].tensor_s,
        waiting_s=max(0.0, step_s - busy[most]),
        exposed_s=exposed[most],
        memory_bytes=0,
    )


class _RankStep:
    """A step of a rank that has such a part; seconds of `forward_s` and `backward_s` are of one microbatch."""

    def __init__(
        self,
        part: StagePart,
        parts: Parts,
        replica: Profile,
        mesh: Mesh,
        cluster: Cluster,
        samples: int,
        microbatches: int,
    ) -> None:
        self._trial, self._replica, self._mesh, self._cluster = part.trial, replica, mesh, cluster
        self._microbatches, whole = microbatches, parts.whole
        times = samples / parts.num_samples
        self.gives = [times * each for each in part.gives]
        place = place_along("tensor", mesh, cluster)
        self._apart = place.num_hosts == 1
        """Whether what ranks say to split layers leaves the network to others."""
        # Of what the profile took: it knows more of a step than layers alone, such as the loss.
        pace = [
            known / tried / microbatches if tried else 0.0
            for known, tried in ((replica.forward_s, whole.forward_s), (replica.backward_s, whole.backward_s))
        ]
        self._pace_back = pace[1]
        self._computing = pace[0] * part.trial.forward_s, pace[1] * part.trial.backward_s
        self._talking = talking_s(part.trial.forward, times, place), talking_s(part.trial.backward, times, place)
        self._said = [talking_s([each], times, place) for each in part.trial.backward]
        self.forward_s, self.backward_s = (sum(pair) for pair in zip(self._computing, self._talking, strict=True))
        self.optimizer_s = replica.step_s * part.trial.gradient_bytes / max(1, replica.gradient_bytes)

    @property
    def tensor_s(self) -> float:
        return self._microbatches * sum(self._talking)

    @property
    def computing_s(self) -> float:
        return self._microbatches * sum(self._computing) + self.optimizer_s

    @property
    def busy_s(self) -> float:
        """Of the whole step, without the exchange along `data`."""
        return self.computing_s + self.tensor_s

    def exposed_s(self, strategy: Strategy) -> float:
        """Of the exchange along `data`."""
        if self._mesh.data == 1:
            return 0.0
        place = place_along("data", self._mesh, self._cluster)
        return formula_of(strategy)(strategy, self._exchanged, place).exposed_s

    @property
    def _exchanged(self) -> Profile:
        """The rank's gradients, and when each is ready: at once, if the exchange begins when all are.

        While ranks talk about layers over the same network, nothing else can hide there.
        """
        if self._mesh.pipe > 1:
            gradients = tuple(replace(each, ready_s=0.0) for each, _ in self._trial.gradients)
            return replace(self._replica, gradients=gradients, backward_s=0.0)
        if self._mesh.tensor == 1:
            return self._replica
        ready = [
            self._pace_back * each.ready_s + (sum(self._said[:number]) if self._apart else 0.0)
            for each, number in self._trial.gradients
        ]
        gradients = tuple(replace(it, ready_s=at) for (it, _), at in zip(self._trial.gradients, ready, strict=True))
        return replace(
            self._replica, gradients=gradients, backward_s=self.backward_s if self._apart else self._computing[1]
        )
