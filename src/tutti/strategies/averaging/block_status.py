"""Block status: a small message from every rank to every other before an exchange of a block.

How it works
------------
Before ranks exchange anything they must agree on three things: whether a block ends, or all have come to `consensus`,
`state_dict`, the end of the data or `finish`; how many samples each rank's change counts for; and whether any rank saw
a loss that was not finite. Each rank sends one row of float64 (`RankStatus`) to every other and waits for theirs. When
all rows are there, `BlockStatus` is the same on every rank, so all of them take the same branch without further
messages.

Ranks may be many steps apart when one of them waits here. The wait is ended by the last rank's row. It must not run
into the transport's deadline only because a peer is slow, so a rank that is still computing sends keep-alive rows
(`keep_alive`) now and then. Their first element is 1 instead of 0; the receiver drops them and waits again, with a
new deadline. If a peer is gone, the transport raises `RankLost` in the receive. Messages of one channel arrive in
order, so a rank's keep-alive rows always precede its status for the same exchange.
"""

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from tutti.errors import ConfigError
from tutti.transports import SharesMemory, Transport, Work
from tutti.transports.base import Operation

# Several, so that the wait survives if a few of them come late.
_KEEP_ALIVES_PER_TIMEOUT = 8


class Intent(IntEnum):
    """Why a rank sends its status: to end a block, or for a collective call between blocks.

    The order matters: the smallest intent of all ranks is what happens, so a block that one rank ends goes first.
    """

    BLOCK = 0
    CONSENSUS = 1
    SAVE = 2
    END_OF_DATA = 3
    FINISH = 4


class RankStatus(NamedTuple):
    """The status of one rank; every field is sent as a float64."""

    intent: Intent
    weight: float
    """Samples of this rank in the block; NaN if one of its losses was not finite."""
    step_s: float
    """Seconds per step of this rank in the block."""
    exchange_s: float
    """Seconds of the last exchange; 0 after the first, which also opened connections."""
    optimizer_digest: int
    """A checksum of the names and shapes of the optimiser's state."""


class BlockStatus:
    """The status of all ranks: one row per rank, the same on every rank once received."""

    def __init__(self, rank: int, size: int, local: RankStatus) -> None:
        """Start with the status of this rank alone; the other rows are 0 until they are received."""
        # [ranks, fields]. Intents and digests (32 bits) are exact in float64.
        self.rows = torch.zeros(size, len(local), dtype=torch.float64, device="cpu")
        self.rows[rank] = torch.tensor(local, dtype=torch.float64, device="cpu")

    @property
    def intents(self) -> list[Intent]:
        """The intent of each rank."""
        return [Intent(int(number)) for number in self.rows[:, 0]]

    @property
    def weights(self) -> Tensor:
        """The number of samples of each rank."""
        return self.rows[:, 1]

    @property
    def non_finite(self) -> list[int]:
        """The ranks with a loss that was not finite."""
        return self.weights.isnan().nonzero().flatten().tolist()

    @property
    def step_s(self) -> float:
        """Seconds per step of the slowest rank, which the others wait for."""
        return float(self.rows[:, 2].max())

    @property
    def exchange_s(self) -> float:
        """Seconds of the last exchange on the rank that came last, and so waited for nobody."""
        return float(self.rows[:, 3].min())

    @property
    def same_optimizer_state(self) -> bool:
        """Whether all optimisers keep state of the same names and shapes."""
        return bool((self.rows[:, 4] == self.rows[0, 4]).all())


class StatusExchange:
    """Exchanges the status of ranks on a channel of its own."""

    def __init__(self, transport: Transport) -> None:
        # Messages only: where the transport shares memory, the plain transport beneath it is used.
        plain = transport.inner if isinstance(transport, SharesMemory) else transport
        self._channel = plain.channel("calls")
        self._peers = [rank for rank in range(transport.size) if rank != transport.rank]
        self._last_sent_s = self._channel.now()

    def start(self, local: RankStatus) -> tuple[BlockStatus, Work]:
        """Send this rank's status; return the status of all ranks, and the work after which it is complete."""
        status = BlockStatus(self._channel.rank, self._channel.size, local)
        return status, self._channel.spawn(self._exchange(status))

    def _exchange(self, status: BlockStatus) -> Operation:
        """Send this rank's row, and receive those of all others, keep-alive rows aside."""
        keep_alive_flag = torch.zeros(len(status.rows), 1, dtype=torch.float64, device="cpu")
        # [ranks, 1 + fields]: this rank's row is sent, the others are received in place.
        received = torch.cat([keep_alive_flag, status.rows], dim=1)
        rows = received.unbind()
        # Started before the first receive: every rank does the same, so nobody waits for a row that is not on its way.
        sends = [self._channel.isend(rows[self._channel.rank], peer) for peer in self._peers]
        missing = self._peers
        while missing:
            yield from [self._channel.irecv(rows[peer], peer) for peer in missing]
            flags = received[:, 0].tolist()
            missing = [peer for peer in missing if flags[peer]]  # A keep-alive row: that peer still computes.
        status.rows.copy_(received[:, 1:])
        # Last: a peer that computes for long takes this row late, but all rows are here already.
        yield from sends

    def keep_alive(self) -> None:
        """Tell ranks that may wait for this one that it is still computing; sends something now and then only."""
        now_s = self._channel.now()
        if now_s - self._last_sent_s > self._channel.timeout.total_seconds() / _KEEP_ALIVES_PER_TIMEOUT:
            self._last_sent_s = now_s
            self._channel.spawn(self._send_keep_alive())

    def _send_keep_alive(self) -> Operation:
        # As long as a status, because the receiver cannot know which of the two comes. Only the first element counts.
        row = torch.ones(1 + len(RankStatus._fields), dtype=torch.float64, device="cpu")
        yield from [self._channel.isend(row, peer) for peer in self._peers]


def different_calls_error(intents: list[Intent], transport: Transport) -> ConfigError:
    """Return the error for ranks that are all between blocks, but in different collective calls."""
    calls = {
        Intent.CONSENSUS: "consensus()",
        Intent.SAVE: "state_dict() or load_state_dict()",
        Intent.END_OF_DATA: "the end of the data",
        Intent.FINISH: "finish()",
    }
    listed = ", ".join(
        f"rank {rank} in {calls[intent]}" for rank, intent in zip(transport.world_ranks, intents, strict=True)
    )
    return ConfigError(
        f"rank {transport.world_rank}: ranks are in different collective calls: {listed}. Every rank must enter "
        "the same."
    )
