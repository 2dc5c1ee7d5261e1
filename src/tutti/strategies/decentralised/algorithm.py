"""The contract between `PeerExchange` and a decentralised algorithm, and the state that both share."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tutti.replica import Replica
from tutti.strategies.decentralised.averaging_rounds import AveragingRounds, RoundPurpose, RoundResult
from tutti.strategies.decentralised.flat_model import FlatModel
from tutti.strategies.decentralised.packets import UpdatePackets
from tutti.strategies.decentralised.peer_group import PeerGroup
from tutti.strategies.decentralised.wire import PeerMessageHeader
from tutti.strategies.resumable import KnownSteps
from tutti.transports.base import Operation


@dataclass(eq=False)
class PeerContext:
    """The state of one rank that its exchange and its algorithm share."""

    replica: Replica
    model: FlatModel
    base: Tensor
    """The model's values after the last exchange, flat. The algorithm writes it."""
    group: PeerGroup
    rounds: AveragingRounds
    run_round: Callable[[RoundPurpose], RoundResult]
    """Takes part in an averaging round, from the training thread."""
    is_away: bool = False
    """Whether this rank is on leave."""

    @property
    def rank(self) -> int:
        return self.group.rank

    def wait(self, operation: Operation) -> None:
        """Run a generator in the transport's thread and wait for it, from the training thread."""
        self.group.wait(operation, self.replica.steps)


class PeerAlgorithm(ABC):
    """How peers exchange what their optimisers' steps change.

    `exchange_step`, `add_change`, `set_waiting`, `leave` and `join` are called by the training thread, and reach shared
    state through `PeerContext.wait` only. All other methods run in the transport's thread.
    """

    adds_changes: bool = False
    """Whether what ranks change is added up over ranks, so that parameters may not be changed by hand."""

    def __init__(self, context: PeerContext) -> None:
        self._context = context
        self._model, self._group, self._rounds = context.model, context.group, context.rounds
        self.known_steps: dict[int, KnownSteps] = {}
        """By rank: how many of its steps, since this was made, are in the values of this rank."""

    def start(self) -> None:
        """Send what peers expect before the first step."""
        return None

    @property
    @abstractmethod
    def clock(self) -> int:
        """Number of steps that this rank has exchanged."""

    @abstractmethod
    def exchange_step(self) -> None:
        """Exchange what the optimiser's step has changed, and load the result into the model."""

    def add_change(self, change: Tensor) -> None:
        """Add what the user has changed since the last step; the next step adds it otherwise."""
        assert not self.adds_changes, "changes by hand are refused"
        self._context.wait(self.shift(change))

    @abstractmethod
    def receive(self, peer: int, header: PeerMessageHeader, payload: Tensor | None) -> None:
        """Handle a message of a peer. Raises `PacketError` if it is malformed."""

    @abstractmethod
    def metrics(self) -> dict[str, Any]:
        """Return what only this algorithm can report."""

    def peer_lost(self, peer: int) -> None:
        """Go on without a peer."""
        self._rounds.peer_lost(peer)

    def before_round(self) -> Operation:
        """Do what must be done before this rank announces that it has entered a round."""
        yield from ()

    def is_ready(self) -> bool:
        """Whether everything has arrived that was under way when all peers entered the round."""
        return True

    def values(self) -> Tensor:
        """Return this rank's values for an averaging round, flat."""
        return self._context.base

    def round_finished(self, result: RoundResult) -> None:
        """Go on from the result of an averaging round."""
        return None

    def set_waiting(self, waiting: bool) -> None:
        """Let peers go on as far as they can while this rank waits between two steps; afterwards, train on."""
        return None

    # Checkpoints: between two steps, when all ranks have come to a round.

    packets: UpdatePackets | None = None
    """Encodes what this rank sends, where that may be compressed."""

    @property
    def own_values(self) -> tuple[Tensor, float] | None:
        """This rank's values, flat, and their push-sum weight; None where all ranks have the same after a round."""
        return None

    def restart(self, values: Tensor, weight: float, clock: int) -> Operation:
        """Continue from other values, of this weight, at a clock. A round follows, to which all ranks come."""
        if not self._model.sizes_only:
            self._context.base.copy_(values)
        yield from ()

    def shift(self, change: Tensor) -> Operation:
        """Add a change to this rank's values."""
        self._model.add(self._context.base, change)
        yield from ()

    @abstractmethod
    def leave(self) -> None:
        """Let the others go on without this rank."""

    @abstractmethod
    def join(self) -> None:
        """Take part again."""
