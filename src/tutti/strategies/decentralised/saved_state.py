"""`SavedReplica`: what a rank among peers saves, and how another run continues from it."""

from typing import Any

from torch import Tensor

from tutti.codecs import Codec
from tutti.strategies.compressed_state import CodecMemory, FlatStates, owed
from tutti.strategies.decentralised.algorithm import PeerAlgorithm, PeerContext
from tutti.strategies.decentralised.averaging_rounds import RoundPurpose, RoundResult
from tutti.strategies.resumable import KnownSteps, Resumable
from tutti.strategies.saved_state import (
    PerRank,
    load_optimizer_states,
    load_own_buffers,
    optimizer_states,
    own_buffers,
)
from tutti.strategies.user_changes import UserChanges


class SavedReplica(Resumable):
    """Saves and loads what a rank has of its own. `PeerExchange` has the fields."""

    context: PeerContext
    algorithm: PeerAlgorithm
    _local_values: Tensor | None
    _user_changes: UserChanges | None

    def _agree(self) -> Tensor:
        raise NotImplementedError

    def _parameters_written(self) -> None:
        raise NotImplementedError

    def run_round(self, purpose: RoundPurpose) -> RoundResult:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return what each rank has of its own: parameters, buffers and optimiser; and what its codec has not sent."""
        algorithm, model = self.algorithm, self.context.model
        if self._local_values is None:
            self._agree()
            # Peers' updates that have arrived are applied; after a round all ranks continue from the mean.
            model.write_model(self.context.base)
            self._parameters_written()
            buffers = own_buffers(self.replica)
        else:  # Within a consensus: all ranks are in it, and the model does not hold this rank's values.
            buffers = model.own_buffers(self._local_values)
        values, weight = algorithm.own_values or (None, 1.0)
        own = {
            "parameters": {} if values is None else model.named(values),
            "weight": weight,
            "clock": algorithm.clock,
            "buffers": buffers,
            "optimizer": optimizer_states(self.replica.optimizer, self.replica.slots),
        }
        state: dict[str, Any] = {"replicas": PerRank(own)}
        if (packets := algorithm.packets) is not None and packets.codec is not None:
            memory = CodecMemory.collect(packets.codec_states)
            state["update_residuals"] = memory.state_dict(packets.codec, share=1.0)
        return state

    def steps_of(self, rank: int) -> KnownSteps | None:
        return self.algorithm.known_steps.get(rank)

    def load_state_dict(self, state: dict[str, Any]) -> set[str]:
        """Continue from the model as it is here, or each rank from its own, where as many ranks were saved."""
        if self._user_changes is not None:
            self._user_changes.changed()  # The model that the user has loaded is taken.
        context, model = self.context, self.context.model
        values, weight, clock = model.read_model(model.empty()), 1.0, self.replica.steps
        used = set()
        if self._fits(ranks := state.get("replicas", [])):
            used.add("replicas")
            saved = ranks[context.rank % len(ranks)]
            clock = saved["clock"]
            if saved["parameters"]:
                values, weight = model.from_named(saved["parameters"]), saved["weight"]
            if len(ranks) == self.transport.size:
                load_own_buffers(self.replica, saved["buffers"])
            load_optimizer_states(self.replica.optimizer, self.replica.slots, saved["optimizer"])
        context.wait(self.algorithm.restart(values, weight, clock))
        rest: dict[str, Tensor] = {}
        packets = self.algorithm.packets
        if packets is not None and packets.codec is not None and "update_residuals" in state:
            used.add("update_residuals")
            rest = self._load_residuals(state["update_residuals"], packets.codec, packets.codec_states)
        self.add_to_model(rest)
        return set(state) - used

    def _fits(self, ranks: list[Any]) -> bool:
        """Whether ranks can continue as those of a saved run: with a model of its own each, or all with the same."""
        if not any(saved["parameters"] for saved in ranks):
            return bool(ranks)
        return self.algorithm.own_values is not None and len(ranks) == self.transport.size

    def _load_residuals(self, saved: dict[str, Any], codec: Codec, states: FlatStates) -> dict[str, Tensor]:
        """Take over what ranks had not sent yet; return what is owed that the codec does not take over."""
        memory = CodecMemory.inherited(saved, codec, 1.0, self.context.rank, range(self.transport.size))
        memory.distribute(states)
        return owed(saved, codec, [span.slot.name for _, spans in states for span in spans])

    def add_to_model(self, changes: dict[str, Tensor]) -> None:
        context = self.context
        if changes:
            context.wait(self.algorithm.shift(context.model.from_named(changes)))
        context.model.write_model(context.base)
        self._parameters_written()
        # No rank trains on before all have changed their values; neighbours then send each other the new ones.
        self.run_round(RoundPurpose.REGROUP)
