"""The layout of the counters page that the ranks of a shared-memory channel have in common.

The page starts with a head of 16 slots of 8 bytes, which `Flags` uses for sleeping and waking. A row of 160 slots per
rank follows. Each rank writes only its own row, and all ranks read all rows. `ready` and `done`, which ranks poll,
lie on different cache lines (8 slots each), so that a rank that polls one does not slow down the writer of the other.

A row: slot 0 `ready` and slot 4 `closed`, slot 8 `done` and slot 12 `progress`, then a ring of 32 entries, one per
reduction. An entry has 4 slots: length, dtype and kind, position in shared memory, weight (as float64).
"""

import mmap

import numpy as np

from tutti.transports.shared_memory.flags import Flags

NUM_ENTRIES = 32
"""Reductions that may be in progress: the entry of one that is older is written over."""

_HEAD, _ROW = 16, 160
_READY, _CLOSED, _DONE, _PROGRESS, _ENTRIES = 0, 4, 8, 12, 16
_ENTRY = 4


class RankCounters:
    """The counters of one channel: how far each rank is, and what it asked for."""

    def __init__(self, page: memoryview, rank: int, size: int, num_spins: int) -> None:
        """Use `page`, of `page_bytes(size)` zeros at first, as rank `rank` of `size`."""
        self.flags = Flags(np.frombuffer(page, dtype=np.int64, count=_HEAD + _ROW * size), num_spins)
        self._size = size
        self._rows = _HEAD + _ROW * np.arange(size, dtype=np.int64)
        self._row = int(self._rows[rank])
        self.ready = self._rows + _READY
        """Slots with the number of reductions for which each rank has published its data."""
        self.done = self._rows + _DONE
        """Slots with the number of reductions whose slice each rank has summed and written back."""
        self.local_ready, self.local_done = self._row + _READY, self._row + _DONE

    @staticmethod
    def page_bytes(size: int) -> int:
        """Bytes of the page for `size` ranks."""
        # 8 bytes per slot; whole pages of the kernel, behind which other memory may follow.
        return -(-8 * (_HEAD + _ROW * size) // mmap.PAGESIZE) * mmap.PAGESIZE

    def local_entry(self, index: int) -> int:
        """The first slot of this rank's entry for reduction `index`."""
        return self._row + _ENTRIES + _ENTRY * (index % NUM_ENTRIES)

    def entries(self, index: int) -> np.ndarray:
        """The first slots of all ranks' entries for reduction `index`."""
        return self._rows + (_ENTRIES + _ENTRY * (index % NUM_ENTRIES))

    def entry_values(self, index: int) -> np.ndarray:
        """What the ranks wrote in their entries for reduction `index`: a row of 4 integers per rank."""
        first = _ENTRIES + _ENTRY * (index % NUM_ENTRIES)
        return self.flags.counters[_HEAD:].reshape(self._size, _ROW)[:, first : first + _ENTRY]

    def close(self) -> None:
        """Announce that this rank has closed the channel."""
        self.flags.publish(self._row + _CLOSED, 1)

    def closed_ranks(self) -> list[int]:
        """Ranks that have closed the channel."""
        # Plain reads: a value that is missed now is seen at the next check.
        return np.flatnonzero(self.flags.counters[self._rows + _CLOSED]).tolist()

    def report_progress(self) -> None:
        """Announce that this rank is slow but working. It needs no fence: only whether it changes matters."""
        self.flags.counters[self._row + _PROGRESS] += 1

    def progress(self) -> int:
        """A number that changes whenever a rank reports progress."""
        # The counters only grow, so their sum changes if any of them does.
        return int(self.flags.counters[self._rows + _PROGRESS].sum())
