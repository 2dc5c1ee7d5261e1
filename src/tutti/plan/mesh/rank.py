"""A step of one rank of a mesh, from what was tried out with other samples."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tutti.cluster import Cluster
from tutti.cost import Profile
from tutti.parallel import Mesh
from tutti.parallel.pipeline.order import Action, most_held
from tutti.plan.mesh.axes import place_along
from tutti.plan.mesh.communication import talking_s
from tutti.plan.mesh.parts import Parts, StagePart
from tutti.plan.mesh.play import StageTime
from tutti.strategies import Strategy


@dataclass(frozen=True)
class Share:
    """What a replica is to do in a step, and where."""

    mesh: Mesh
    cluster: Cluster
    replica: Profile
    """Of all its samples, on one rank."""
    num_microbatches: int

    @property
    def samples(self) -> float:
        """Of a microbatch."""
        return self.replica.num_samples / self.num_microbatches


class RankStep:
    """Of a rank that has one stage, perhaps with others who split its layers."""

    def __init__(self, part: StagePart, parts: Parts, share: Share, actions: Sequence[Action]) -> None:
        trial = part.trial
        self._trial, self._share = trial, share
        self._times = share.samples / parts.num_samples
        self._gives = [self._times * each for each in part.gives]
        self._held = most_held(actions, actions[0].stage)
        # In proportion to what the profile took: it knows more of a step than layers alone, such as the loss.
        replica, whole = share.replica, parts.whole
        self._pace = _ratio(replica.forward_s, whole.forward_s), _ratio(replica.backward_s, whole.backward_s)
        place = place_along("tensor", share.mesh, share.cluster)
        self._over_network = place.num_hosts > 1
        number = share.num_microbatches
        said = [[talking_s(it, self._times, place) for it in each] for each in (trial.forward, trial.backward)]
        computing = [
            pace * it / number for pace, it in zip(self._pace, (trial.forward_s, trial.backward_s), strict=True)
        ]
        self._said, self._computing = said, computing
        self.tensor_s = number * sum(map(sum, said))
        self.optimizer_s = replica.step_s * self._of_replica
        self.computing_s = number * sum(computing) + self.optimizer_s

    @property
    def _of_replica(self) -> float:
        """The part of the replica's parameters that are this rank's."""
        return self._trial.gradient_bytes / max(1, self._share.replica.gradient_bytes)

    def exposed_s(self, strategy: Strategy) -> float:
        """Of the exchange along `data`, what computing does not hide."""
        mesh = self._share.mesh
        if mesh.data == 1:
            return 0.0
        place = place_along("data", mesh, self._share.cluster)
        return strategy.cost(self._exchanged(), place).exposed_s

    def _exchanged(self) -> Profile:
        """This rank's gradients and when each is ready: of a stage all at once, when the last microbatch is done."""
        mesh, replica, trial = self._share.mesh, self._share.replica, self._trial
        if mesh.pipe > 1:
            return replace(
                replica, gradients=tuple(replace(it, ready_s=0.0) for it, _ in trial.gradients), backward_s=0
            )
        if mesh.tensor == 1:
            return replica
        # While ranks talk about layers over the network, nothing else can: only computing hides what is exchanged.
        said = [0.0 if self._over_network else each for each in self._said[1]]
        gradients = tuple(
            replace(it, ready_s=self._pace[1] * it.ready_s + sum(said[:number])) for it, number in trial.gradients
        )
        return replace(replica, gradients=gradients, backward_s=self._pace[1] * trial.backward_s + sum(said))

    def time(self, exposed_s: float) -> StageTime:
        """In a pipeline, if its exchange along `data` takes so long."""
        (forward_s, backward_s), said = self._computing, self._said
        ending_s = exposed_s + self.optimizer_s
        if self._over_network:
            return StageTime(forward_s, backward_s, (said[0], said[1]), self._gives, ending_s)
        return StageTime(forward_s + sum(said[0]), backward_s + sum(said[1]), ((), ()), self._gives, ending_s)

    @property
    def lasting_bytes(self) -> float:
        """Parameters, buffers, gradients, and what the optimiser keeps."""
        state = self._share.replica.state_bytes * self._of_replica
        return self._trial.parameter_bytes + self._trial.gradient_bytes + state

    @property
    def memory_bytes(self) -> float:
        """With the batch, and the activations of microbatches that are under way."""
        mesh, trial, times = self._share.mesh, self._trial, self._times
        if mesh.tensor == mesh.pipe == 1:
            return self._share.replica.peak_bytes
        working = max(times * trial.kept_bytes, trial.most_bytes * max(1.0, times) - trial.gradient_bytes)
        kept = (self._held - 1) * times * (trial.kept_bytes + trial.taken_bytes)
        return self.lasting_bytes + working + times * trial.taken_bytes + kept


def _ratio(known: float, tried: float) -> float:
    return known / tried if tried else 0.0
