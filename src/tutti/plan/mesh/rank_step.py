"""`RankStep`: the step of one rank of a mesh, scaled from its profiled stage to the samples of the job."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tutti.cluster import Cluster
from tutti.cost import Profile
from tutti.parallel import Mesh
from tutti.parallel.pipeline.schedules import Action, max_live_microbatches
from tutti.plan.mesh.axis_placement import placement_along
from tutti.plan.mesh.communication import collective_seconds
from tutti.plan.mesh.parts import ModelParts, StagePart
from tutti.plan.mesh.pipeline_simulation import StageTime
from tutti.strategies import Strategy


@dataclass(frozen=True)
class ReplicaStep:
    """The work of one replica in a step, and the mesh and cluster it runs on."""

    mesh: Mesh
    cluster: Cluster
    profile: Profile
    """The profile of all its samples on one rank."""
    num_microbatches: int

    @property
    def samples_per_microbatch(self) -> float:
        return self.profile.num_samples / self.num_microbatches


class RankStep:
    """The predicted step of a rank that has one stage, and perhaps splits its layers with other ranks."""

    def __init__(self, part: StagePart, parts: ModelParts, replica: ReplicaStep, actions: Sequence[Action]) -> None:
        stage = part.profile
        self._stage, self._replica = stage, replica
        # Samples of a microbatch, relative to the batch that the parts were profiled with.
        self._batch_scale = replica.samples_per_microbatch / parts.num_samples
        self._output_bytes = [self._batch_scale * num_bytes for num_bytes in part.output_bytes]
        # Microbatches that are between their forward and their backward pass at the same time.
        self._num_held = max_live_microbatches(actions, actions[0].stage)
        # Times are scaled to the profile of the whole step, which includes more than layers, such as the loss. The
        # profile is of all samples of the replica, on its slowest rank: the scale corrects for both.
        profile, full_model = replica.profile, parts.full_model
        self._forward_scale = _ratio(profile.forward_s, full_model.forward_s)
        self._backward_scale = _ratio(profile.backward_s, full_model.backward_s)
        placement = placement_along("tensor", replica.mesh, replica.cluster)
        self._over_network = placement.num_hosts > 1
        number = replica.num_microbatches
        # Seconds of each collective of one microbatch, in forward and in backward.
        self._collectives_s = [
            [collective_seconds(traced, self._batch_scale, placement) for traced in trace]
            for trace in (stage.forward, stage.backward)
        ]
        # Seconds of computation for one microbatch.
        self._forward_s = self._forward_scale * stage.forward_s / number
        self._backward_s = self._backward_scale * stage.backward_s / number
        self.tensor_s = number * sum(map(sum, self._collectives_s))
        # An optimiser's time grows with its parameters, and hardly with the batch.
        self.optimizer_s = profile.step_s * self._parameter_share
        self.computing_s = number * (self._forward_s + self._backward_s) + self.optimizer_s

    @property
    def _parameter_share(self) -> float:
        """The share of the replica's parameters that this rank holds."""
        return self._stage.gradient_bytes / max(1, self._replica.profile.gradient_bytes)

    def exposed_s(self, strategy: Strategy) -> float:
        """Return the seconds of the exchange along `data` that computation does not hide."""
        mesh = self._replica.mesh
        if mesh.data == 1:
            return 0.0
        return strategy.cost(self._gradient_profile(), placement_along("data", mesh, self._replica.cluster)).exposed_s

    def _gradient_profile(self) -> Profile:
        """Return the profile of this rank's gradients; those of a stage are all ready after the last microbatch."""
        mesh, profile, stage = self._replica.mesh, self._replica.profile, self._stage
        if mesh.pipe > 1:  # No backward is left then to hide the exchange.
            ready = tuple(replace(gradient, ready_s=0.0) for gradient, _ in stage.gradients)
            return replace(profile, gradients=ready, backward_s=0)
        if mesh.tensor == 1:
            return profile
        # Tensor-parallel collectives over the network occupy the card: only computation hides the exchange then.
        collectives_s = [0.0 if self._over_network else seconds for seconds in self._collectives_s[1]]
        gradients = tuple(
            replace(gradient, ready_s=self._backward_scale * gradient.ready_s + sum(collectives_s[:num_before]))
            for gradient, num_before in stage.gradients
        )
        backward_s = self._backward_scale * stage.backward_s + sum(collectives_s)
        return replace(profile, gradients=gradients, backward_s=backward_s)

    def time(self, exposed_s: float) -> StageTime:
        """Return the times for the simulation of a pipeline, if the exchange along `data` takes `exposed_s`."""
        forward_s, backward_s, (forward, backward) = self._forward_s, self._backward_s, self._collectives_s
        ending_s = exposed_s + self.optimizer_s
        if self._over_network:  # Collectives compete with messages between stages for the card.
            return StageTime(forward_s, backward_s, (forward, backward), self._output_bytes, ending_s)
        return StageTime(forward_s + sum(forward), backward_s + sum(backward), ((), ()), self._output_bytes, ending_s)

    @property
    def lasting_bytes(self) -> float:
        """Bytes of parameters, buffers, gradients and optimiser state."""
        state = self._replica.profile.state_bytes * self._parameter_share
        return self._stage.parameter_bytes + self._stage.gradient_bytes + state

    @property
    def memory_bytes(self) -> float:
        """Bytes with the batch, and with the activations of the microbatches that the schedule holds at once."""
        mesh, stage, scale = self._replica.mesh, self._stage, self._batch_scale
        if mesh.tensor == mesh.pipe == 1:
            return self._replica.profile.peak_bytes
        # Of the microbatch at work: what it keeps for backward, or the peak of its passes. The peak is not scaled below
        # the profiled batch, because part of it does not shrink with the batch. Gradients are in `lasting_bytes`.
        working = max(scale * stage.kept_bytes, stage.peak_bytes * max(1.0, scale) - stage.gradient_bytes)
        # Of the others: activations and inputs.
        kept = (self._num_held - 1) * scale * (stage.kept_bytes + stage.input_bytes)
        return self.lasting_bytes + working + scale * stage.input_bytes + kept


def _ratio(numerator: float, denominator: float) -> float:
    """Return the quotient; 0 where the denominator is 0, as under a clock that counts no operations."""
    return numerator / denominator if denominator else 0.0
