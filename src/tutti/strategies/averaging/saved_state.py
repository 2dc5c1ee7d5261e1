"""`SavedBlock`: what a block of local steps saves, and how another run continues it."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tutti.strategies.averaging.block_schedule import BlockSchedule
from tutti.strategies.averaging.block_status import Intent
from tutti.strategies.averaging.outer_optimizer import BlockParameters
from tutti.strategies.compressed_means import CompressedMean
from tutti.strategies.compressed_state import owed
from tutti.strategies.resumable import Resumable
from tutti.strategies.saved_state import (
    PerRank,
    load_optimizer_states,
    load_own_buffers,
    optimizer_states,
    own_buffers,
)
from tutti.transports import Transport

if TYPE_CHECKING:
    from tutti.strategies.averaging.strategy import LocalSteps


class SavedBlock(Resumable):
    """Saves and loads the block in progress. `BlockExchange` has the fields."""

    _channel: Transport
    _strategy: "LocalSteps"
    _parameters: list[BlockParameters]
    _schedule: BlockSchedule
    _compressed_mean: CompressedMean | None
    _local_parameters: list[list[Tensor]]
    _local_buffers: list[Tensor]
    _num_steps: int
    _weight: float
    _trained_s: float
    _num_blocks: int
    _since_s: float
    _unused_state: dict[str, Any]

    def _synchronise(self, intent: Intent) -> None:
        raise NotImplementedError

    def _begin_block(self) -> None:
        raise NotImplementedError

    def _abandon_exchange(self) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the block's start, and each rank's parameters and optimiser, so that a block continues exactly."""
        self._synchronise(Intent.SAVE)
        return self._own_state()

    def state_after_loss(self) -> dict[str, Any]:
        self._abandon_exchange()
        return self._own_state()

    @torch.no_grad()
    def _own_state(self) -> dict[str, Any]:
        start: dict[str, Tensor] = {}
        velocity: dict[str, Tensor] = {}
        local_parameters: dict[str, Tensor] = {}
        # Inside `consensus` the model shows the mean, and the rank's own parameters are kept aside.
        values = self._local_parameters or [parameters.tensors for parameters in self._parameters]
        for parameters, local in zip(self._parameters, values, strict=True):
            names = [slot.name for slot in parameters.bucket.slots]
            starts, velocities = parameters.saved()
            start.update(zip(names, starts, strict=True))
            # Empty without momentum, and for running statistics.
            velocity.update(zip(names, velocities, strict=False))
            local_parameters.update(zip(names, local, strict=True))
        buffers = own_buffers(self.replica, self._local_buffers or None)
        optimizer = optimizer_states(self.replica.optimizer, self.replica.slots)
        own = {
            "own": local_parameters,
            "buffers": buffers,
            "weight": self._weight,
            "steps": self._num_steps,
            "optimizer": optimizer,
        }
        block = {
            "start": start,
            "velocity": velocity,
            # A rank that joins begins where the block did, and has trained on nothing in it.
            "ranks": PerRank(own, new={**own, "own": start, "weight": 0.0}),
            "every": str(self._strategy.every),
            "steps": self._schedule.num_steps,
            "num_blocks": self._num_blocks,
        }
        self._since_s = self._channel.now()
        if self._compressed_mean is None:
            return {"block": block, **self._unused_state}
        return {"block": block, "block_residuals": self._compressed_mean.state_dict()}

    def ranks_have_changed(self) -> None:
        # A loss has interrupted some ranks earlier in the block than others. If they went on counting from there, they
        # would end blocks after different steps, and wait for a rank that is in another call.
        self._num_steps, self._trained_s = 0, 0.0

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> set[str]:
        """Continue from `state`; with another number of ranks, from the mean of the saved ranks' parameters."""
        self._synchronise(Intent.SAVE)  # No exchange of earlier blocks may be pending.
        used, dropped = set[str](), set[str]()
        if "block" in state:
            used.add("block")
            dropped = self._load_block(state["block"])
        elif self.replica.restoring:
            self._begin_block()
            for parameters in self._parameters:
                parameters.load(parameters.tensors, [], parameters.tensors)  # A new block, from the model as it is.
        if "block_residuals" in state and self._compressed_mean is not None:
            used.add("block_residuals")
            super().add_to_model(self._compressed_mean.load_state_dict(state["block_residuals"]))
        elif "block_residuals" in state and self._strategy.codec is not None:
            # A single rank sends nothing, but its checkpoint may be resumed on several: it is passed on unchanged.
            used.add("block_residuals")
            self._unused_state = {"block_residuals": state["block_residuals"]}
        elif "block_residuals" in state and "block" in state:
            used.add("block_residuals")
            super().add_to_model(owed(state["block_residuals"]))
        self._since_s = self._channel.now()
        return set(state) - used | dropped

    def _load_block(self, block: dict[str, Any]) -> set[str]:
        """Continue a saved block; return the name of what has no use here."""
        ranks = block["ranks"]
        # With more ranks than were saved, some start with the same optimiser state.
        saved = ranks[self._channel.rank % len(ranks)]
        self._begin_block()
        # The same ranks go on in the middle of their block. Others begin a new block, from what all saved ranks
        # together had.
        if len(ranks) == self._channel.size:
            local_parameters = saved["own"]
            self._num_steps, self._weight = saved["steps"], saved["weight"]
            load_own_buffers(self.replica, saved["buffers"])
        else:
            local_parameters = mean_parameters(ranks)
        for parameters in self._parameters:
            names = [slot.name for slot in parameters.bucket.slots]
            parts = (block["start"], block["velocity"], local_parameters)
            parameters.load(*([part[name] for name in names if name in part] for part in parts))
        self._num_blocks = block["num_blocks"]
        # With `every="auto"` the length of a block was found by measuring. It holds only if the option is still the
        # same.
        if block["every"] == str(self._strategy.every):
            self._schedule.num_steps = block["steps"]
        load_optimizer_states(self.replica.optimizer, self.replica.slots, saved["optimizer"])
        moved = any(value.any() for value in block["velocity"].values())
        keeps_velocity = any(parameters.velocity is not None for parameters in self._parameters)
        return {"block momentum"} if moved and not keeps_velocity else set()

    @torch.no_grad()
    def add_to_model(self, changes: dict[str, Tensor]) -> None:
        super().add_to_model(changes)
        for parameters in self._parameters:
            parameters.shift(changes)


def mean_parameters(ranks: list[Any]) -> dict[str, Tensor]:
    """Return the mean of all saved ranks' parameters, weighted by each rank's samples since its block started."""
    total = sum(rank["weight"] for rank in ranks)
    # Saved at the start of a block, no rank has samples yet, and all have the same parameters.
    shares = [rank["weight"] / total if total else 1 / len(ranks) for rank in ranks]
    return {
        name: torch.stack([share * rank["own"][name] for share, rank in zip(shares, ranks, strict=True)]).sum(0)
        for name in ranks[0]["own"]
    }
