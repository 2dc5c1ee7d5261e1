"""What ranks tell each other before they exchange anything: why they have come, and what theirs counts for."""

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from tutti.errors import ConfigError
from tutti.transports import SharesMemory, Transport, Work
from tutti.transports.base import Operation

_BEATS = 8
"""In the time that a wait may last."""


class Intent(IntEnum):
    """Why a rank has come: to end a block, or for what all do together between blocks."""

    BLOCK = 0
    CONSENSUS = 1
    SAVE = 2
    FINISH = 3


class Entry(NamedTuple):
    """What one rank says."""

    intent: Intent
    weight: float
    """Its samples in this block."""
    step_s: float
    exchange_s: float
    """How long the last exchange took; 0 if that was the first, which opened connections."""
    states: int
    """A digest of what its optimiser remembers: names and sizes."""


class Roll:
    """What every rank says before an exchange, a row for each; the same on all when they have heard each other."""

    def __init__(self, rank: int, size: int, mine: Entry) -> None:
        self.rows = torch.zeros(size, len(mine), dtype=torch.float64, device="cpu")
        self.rows[rank] = torch.tensor(mine, dtype=torch.float64, device="cpu")

    @property
    def intents(self) -> list[Intent]:
        return [Intent(int(number)) for number in self.rows[:, 0]]

    @property
    def weights(self) -> Tensor:
        return self.rows[:, 1]

    @property
    def refused(self) -> list[int]:
        """Ranks with a loss that was not finite."""
        return self.weights.isnan().nonzero().flatten().tolist()

    @property
    def step_s(self) -> float:
        """Of the slowest, for whom the others wait."""
        return float(self.rows[:, 2].max())

    @property
    def exchange_s(self) -> float:
        """Of the one that came last, and so waited for nobody."""
        return float(self.rows[:, 3].min())

    @property
    def states_alike(self) -> bool:
        """Whether all optimisers remember the same things."""
        return bool((self.rows[:, 4] == self.rows[0, 4]).all())


class RollCall:
    """Has ranks tell each other, in a conversation of its own, in which those who are slow show that they go on."""

    def __init__(self, transport: Transport) -> None:
        plain = transport.inner if isinstance(transport, SharesMemory) else transport
        self._wire = plain.channel("calls")
        self._others = [rank for rank in range(transport.size) if rank != transport.rank]
        self._beat_s = self._wire.now()

    def start(self, mine: Entry) -> tuple[Roll, Work]:
        """What all ranks say, and the work that is done when they have."""
        roll = Roll(self._wire.rank, self._wire.size, mine)
        return roll, self._wire.spawn(self._call(roll))

    def _call(self, roll: Roll) -> Operation:
        heard = torch.cat([torch.zeros(len(roll.rows), 1, dtype=torch.float64, device="cpu"), roll.rows], dim=1)
        rows = heard.unbind()
        sending = [self._wire.isend(rows[self._wire.rank], peer) for peer in self._others]
        waited = self._others
        while waited:
            yield from [self._wire.irecv(rows[peer], peer) for peer in waited]
            beats = heard[:, 0].tolist()
            waited = [peer for peer in waited if beats[peer]]  # They are slow, and on their way.
        roll.rows.copy_(heard[:, 1:])
        yield from sending

    def beat(self) -> None:
        """Now and then, tell those who may wait for this rank that it goes on."""
        now_s = self._wire.now()
        if now_s - self._beat_s > self._wire.timeout.total_seconds() / _BEATS:
            self._beat_s = now_s
            self._wire.spawn(self._beats())

    def _beats(self) -> Operation:
        beat = torch.ones(1 + len(Entry._fields), dtype=torch.float64, device="cpu")
        yield from [self._wire.isend(beat, peer) for peer in self._others]


def refuse_different(intents: list[Intent], rank: int) -> ConfigError:
    """The error for ranks that are all between blocks, and not for the same."""
    doing = {
        Intent.CONSENSUS: "consensus()",
        Intent.SAVE: "state_dict() or load_state_dict()",
        Intent.FINISH: "finish()",
    }
    said = ", ".join(f"rank {number} in {doing[intent]}" for number, intent in enumerate(intents))
    return ConfigError(f"rank {rank}: ranks came together for different things: {said}. Call them alike on all ranks.")
