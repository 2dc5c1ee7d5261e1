"""Rounds of exchange in shared memory: every rank publishes a buffer, and every rank reads what it needs.

How it works
------------
Each rank has a buffer in two halves; even rounds use one, odd rounds the other. A rank goes through a round like this:

1. Yield `await_writable`: it ends when all ranks have finished the round before the last, which used the same half.
2. Fill its half, and yield `publish_input`: it ends when all ranks have published theirs.
3. Read the others' halves. In some collectives each rank computes a part of the result, puts it into its own half,
   where no other rank reads before, and yields `publish_result`: it ends when all ranks have.
4. Call `finish`.

So a round costs one synchronisation of all ranks, or two with step 3: the two halves save the one between reading and
the next writing.

Each rank writes only its own row of counters: `input`, `result` and `finished` hold the number of rounds for which it
has done so, each on its own cache line. An entry next to them (one per half) says which collective it came for, of
what length and dtype. When all have published, every rank compares all entries, and all raise the same
`ReplicaMismatch` if they differ. Waits end as `SharedMemoryTransport.await_counters` says: when a rank that is late
is lost, or after the timeout.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tutti.errors import ReplicaMismatch
from tutti.transports.base import Work
from tutti.transports.shared_memory.transport import SharedMemoryTransport
from tutti.transports.sockets.frames import DTYPES

# The counters page: a reserved head, then a row per rank.
# In slots of 8 bytes: three counters on a cache line (8 slots) each, then two entries of 4 slots.
_HEAD, _ROW = 16, 32
_INPUT, _RESULT, _FINISHED, _ENTRIES, _ENTRY = 0, 8, 16, 24, 4

Buffers = list[Tensor]
"""The bytes of every rank's buffer, by rank."""


class _CountersReached(Work):
    """Done when a counter of every rank, or of one rank, holds a value."""

    def __init__(self, rounds: "SharedMemoryRounds", slots: np.ndarray, value: int, rank: int | None = None) -> None:
        self._rounds, self._value = rounds, value
        self._slots = slots if rank is None else slots[rank : rank + 1]
        self._ranks = range(rounds.size) if rank is None else [rank]

    def done(self) -> bool:
        return self._rounds.flags.reached(self._slots, self._value)

    def wait(self) -> None:
        self._rounds.wait(self._slots, self._value, self._ranks)


class _InputsPublished(_CountersReached):
    """Done when all ranks have published their input; fails if they came for different collectives."""

    def wait(self) -> None:
        super().wait()
        # Only now are the entries of all ranks there.
        self._rounds.compare_entries()


class SharedMemoryRounds:
    """The buffers of one channel. Every round is collective: all ranks take the same ones in the same order."""

    def __init__(
        self,
        transport: SharedMemoryTransport,
        buffer_bytes: int,
        names: tuple[str, ...],
        action: str = "take part in a collective operation",
    ) -> None:
        """Allocate two halves of `buffer_bytes` per rank, for collectives of these `names`. Collective.

        `action` says what ranks are waited for to do.
        """
        self._transport, self._names, self._action = transport, names, action
        self.rank, self.size, self.buffer_bytes = transport.rank, transport.size, buffer_bytes
        memories = transport.per_rank_tensors(2 * buffer_bytes, torch.uint8)
        # Two halves, used in turn: a rank may write the next round's input while slower ones still read that of this
        # round.
        self._halves = [[memory[half * buffer_bytes :][:buffer_bytes] for memory in memories] for half in range(2)]
        self._typed: dict[tuple[int, torch.dtype], Buffers] = {}
        self.addresses = [np.array([buffer.data_ptr() for buffer in half]) for half in self._halves]
        """The addresses of all ranks' buffers, for even and for odd rounds."""
        self.flags = transport.flags(_HEAD + _ROW * self.size)
        rows = _HEAD + _ROW * np.arange(self.size, dtype=np.int64)
        self._row = int(rows[self.rank])
        self._input, self._result, self._finished = rows + _INPUT, rows + _RESULT, rows + _FINISHED
        self._entries = [rows + _ENTRIES + _ENTRY * half for half in range(2)]
        # Not used: `read_weights` is called only because it compares entries.
        self._weights = np.ones(self.size)
        self.number = 0
        """The number of the round in progress, or of the next."""

    def buffers(self, dtype: torch.dtype) -> Buffers:
        """The buffers of this round as flat tensors, by rank."""
        key = self.number % 2, dtype
        if key not in self._typed:
            # `view` needs a whole number of elements.
            usable = self.buffer_bytes // dtype.itemsize * dtype.itemsize
            self._typed[key] = [buffer[:usable].view(dtype) for buffer in self._halves[key[0]]]
        return self._typed[key]

    def await_writable(self) -> Work:
        """Work that is done when this rank may fill its buffer: all ranks have read what was there."""
        # The half was last used in round `number` - 2, which is over when `number` - 1 rounds are finished.
        # In the first two rounds the value is 0 or less, so nobody waits.
        return _CountersReached(self, self._finished, self.number - 1)

    def publish_input(self, name: str, numel: int, dtype: torch.dtype) -> Work:
        """Publish this rank's buffer for collective `name`. The work is done when all ranks have published theirs."""
        half = self.number % 2
        entry = int(self._entries[half][self.rank])
        self.flags.write_entry(entry, (self._names.index(name), numel, DTYPES.index(dtype)), 1.0)
        # Releases the entry and the buffer: peers read both after they have seen this counter.
        self.flags.publish(self._row + _INPUT, self.number + 1)
        return _InputsPublished(self, self._input, self.number + 1)

    def publish_result(self) -> Work:
        """Publish the part of the result in this rank's buffer. The work is done when all ranks have."""
        self.flags.publish(self._row + _RESULT, self.number + 1)
        return _CountersReached(self, self._result, self.number + 1)

    def await_result(self, rank: int) -> Work:
        """Work that is done when one rank has published its result, which others need not do then."""
        return _CountersReached(self, self._result, self.number + 1, rank)

    def late_ranks(self) -> list[int]:
        """Ranks that have not published their input of this round."""
        return np.flatnonzero(self.flags.counters[self._input] <= self.number).tolist()

    def finish(self) -> None:
        """Note that this rank has read what it needs."""
        # From now on peers may overwrite what this rank read, when they come to the round after the next.
        self.flags.publish(self._row + _FINISHED, self.number + 1)
        self.number += 1

    def compare_entries(self) -> None:
        """Raise `ReplicaMismatch`, on every rank, if they came to this round for different collectives."""
        half = self.number % 2
        if np.isnan(self.flags.read_weights(self._entries[half], self._weights)):
            raise self._mismatch(half)

    def wait(self, slots: np.ndarray, value: int, ranks: Sequence[int]) -> None:
        """Wait until the slots of `ranks` hold `value`, as long as those ranks live and the transport's timeout."""
        self._transport.await_counters(self.flags, slots, value, ranks, self._action)

    def _mismatch(self, half: int) -> ReplicaMismatch:
        """The error that names what each rank called."""
        peers = self._transport.membership.peers
        asked = []
        for peer, entry in zip(peers, self._entries[half].tolist(), strict=True):
            kind, numel, code = self.flags.counters[entry : entry + 3].tolist()
            asked.append(f"rank {peer.rank}: {self._names[kind]} of {numel} × {DTYPES[code]}")
        return ReplicaMismatch(
            f"rank {self._transport.membership.world_rank}: ranks call different operations, or with different "
            f"tensors: {'; '.join(asked)}. All ranks of a group call the same ones in the same order."
        )
