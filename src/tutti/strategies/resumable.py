"""`Resumable`: the part of an exchange that saves its state, and continues from a saved one."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tutti.replica import Replica
from tutti.transports import Transport


class KnownSteps(NamedTuple):
    """How many steps of a rank are in the model with which the others go on without it."""

    complete: int
    """Steps that are in it as a whole."""
    begun: int
    """Steps of which a part may be in it: those that are not complete are in it in part, or lost."""
    is_estimate: bool = False
    """Whether this counts only if nobody knows more."""


class Resumable:
    """What an exchange saves, and how it takes over what an exchange of another kind has saved.

    An exchange takes the parts of a state that it has itself. The job converts others, by `add_to_gradient` and
    `add_to_model` (`job/state.py`).
    """

    replica: Replica
    transport: Transport

    def state_dict(self) -> dict[str, Any]:
        """Return what must be saved, in addition to model and optimiser, to resume exactly. Collective.

        Parts by name, of which `job/state.py` lists those of Tutti's strategies. A part holds tensors by the
        parameters' names, and plain values; `PerRank` marks values of which every rank has its own. A part says nothing
        about buckets, so that another strategy can resume from it.
        """
        return {}

    @property
    def elastic_mistake(self) -> str:
        """Why its ranks cannot change while it trains; empty if they can."""
        return ""

    def state_after_loss(self) -> dict[str, Any]:
        """Return the same after a rank was lost, as far as this rank has it. Not collective.

        The default is right where `state_dict` asks no other rank.
        """
        return self.state_dict()

    def steps_of(self, rank: int) -> KnownSteps | None:
        """Return how many steps of another rank are in the model, since this exchange was made; None if none of them.

        Where the others go on without a lost rank, its samples are used up to there. All living ranks may know another
        number, of which the highest counts: no sample is used twice.
        """
        return None

    def load_state_dict(self, state: dict[str, Any]) -> set[str]:
        """Resume from the parts of `state` that this strategy has, and return the names of the others. Collective.

        `state` is what `state_dict` returned on all ranks, under this strategy or another one, for the same model.

        While `job.restore` loads (`replica.restoring`), the model and the optimiser have just been loaded too, the same
        on every rank: an exchange with values of its own begins from these, also where `state` has no part for it.
        """
        return set(state)

    def ranks_have_changed(self) -> None:
        """All ranks of an elastic world have loaded their states, and go on together: count alike from here."""

    @property
    def num_workers(self) -> int:
        """Number of ranks that train."""
        return self.transport.size

    @property
    def gradient_share(self) -> float:
        """How much one rank's gradient counts in a step of the model: 1/N in a mean over N ranks."""
        return 1 / self.num_workers

    def add_to_gradient(self, owed: dict[str, Tensor]) -> None:
        """Let the next step include these gradients, by parameter, which the steps so far were still owed.

        They are the same on every rank, and count once.
        """
        # Added by every rank to its own gradient, of which all ranks' together then count once.
        factor = 1 / (self.num_workers * self.gradient_share)
        for name, value in owed.items():
            self.replica.owed[name] = self.replica.owed.get(name, 0.0) + value * factor

    @torch.no_grad()
    def add_to_model(self, changes: dict[str, Tensor]) -> None:
        """Add changes, by parameter and the same on every rank, to what all ranks agree on. Collective."""
        for slot in self.replica.slots:
            if slot.name in changes:
                slot.tensor.add_(changes[slot.name].to(slot.tensor))
