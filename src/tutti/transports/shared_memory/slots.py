"""Message slots in shared memory: one rank writes each slot and another reads it, round after round.

How it works
------------
A slot lies in the memory of the rank that reads it. Its counter, in a page that all ranks map, holds the number of
rounds for which it was written. The writer fills the slot and publishes `round + 1`; the reader waits for that value.

Every slot exists twice, for even and odd rounds. So a writer may fill a slot for its next round while the reader still
uses what it got in this one. There is no counter for "read": the caller must ensure that no rank is two
rounds ahead of another.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tutti.transports.shared_memory.transport import SharedMemoryTransport

_HEAD, _LINE = 16, 8  # Slots of the counters page: its reserved head, and one cache line per counter.
_ALIGNED_BYTES = 64


class MessageSlots:
    """All message slots of one channel."""

    def __init__(self, transport: SharedMemoryTransport, slots: Sequence[tuple[int, int]]) -> None:
        """Allocate `slots`, each given by the rank that reads it and its bytes; the same on every rank. Collective."""
        self._transport = transport
        needed = [0] * transport.size
        # `starts[i]` is where slot i begins in its reader's memory; `needed` how much each reader needs per half.
        starts = []
        for rank, num_bytes in slots:
            starts.append(needed[rank])
            needed[rank] += -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        # Mappings are equally long on all ranks, so the largest reader decides.
        half = max(needed)
        memories = transport.per_rank_tensors(2 * half, torch.uint8)
        self._buffers = [
            [memories[rank][parity * half + start :][:num_bytes] for parity in range(2)]
            for start, (rank, num_bytes) in zip(starts, slots, strict=True)
        ]
        self._flags = transport.flags(_HEAD + _LINE * len(slots))
        self._counters = [np.array([_HEAD + _LINE * number]) for number in range(len(slots))]

    def buffer(self, slot: int, number: int) -> Tensor:
        """The bytes of a slot in round `number`."""
        return self._buffers[slot][number % 2]

    def publish(self, slot: int, number: int) -> None:
        """Let the reader of a slot see what was written to it in round `number`."""
        # One more than the round, since fresh counters are 0: round 0 must be told from no round.
        self._flags.publish(int(self._counters[slot][0]), number + 1)

    def wait(self, slot: int, number: int, rank: int) -> None:
        """Wait until `rank` has published a slot in round `number`."""
        self._transport.await_counters(self._flags, self._counters[slot], number + 1, [rank], "fill its message slot")
