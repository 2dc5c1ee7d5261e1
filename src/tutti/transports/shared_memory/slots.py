"""Places in memory of one host, each of which one rank fills and another empties, turn after turn.

Every place is there twice, for even and odd turns. So a rank may fill a place for its next turn while the other still
reads what it got in this one; nobody may be two turns ahead of anybody: whoever takes turns sees to that.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tutti.transports.shared_memory.transport import SharedMemoryTransport

_HEAD, _LINE = 16, 8
_ALIGNED_BYTES = 64


class MessageSlots:
    """Making them is collective: `places` are the same on every rank, each the rank that empties it and its bytes."""

    def __init__(self, transport: SharedMemoryTransport, places: Sequence[tuple[int, int]]) -> None:
        self._transport = transport
        needed = [0] * transport.size
        starts = []
        for rank, num_bytes in places:
            starts.append(needed[rank])
            needed[rank] += -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        half = max(needed)
        boxes = transport.per_rank_tensors(2 * half, torch.uint8)
        self._rooms = [
            [boxes[rank][turn * half + start :][:num_bytes] for turn in range(2)]
            for start, (rank, num_bytes) in zip(starts, places, strict=True)
        ]
        self._flags = transport.flags(_HEAD + _LINE * len(places))
        self._counters = [np.array([_HEAD + _LINE * number]) for number in range(len(places))]

    def room(self, place: int, turn: int) -> Tensor:
        """The bytes of a place in this turn."""
        return self._rooms[place][turn % 2]

    def filled(self, place: int, turn: int) -> None:
        """Let who empties it see what was written there."""
        self._flags.publish(int(self._counters[place][0]), turn + 1)

    def wait(self, place: int, turn: int, rank: int) -> None:
        """Wait until `rank` has filled a place in this turn."""
        self._transport.await_counters(self._flags, self._counters[place], turn + 1, [rank], "fill what it gives")
