"""Rounds of exchange between the ranks of one host: everyone shows something, and everyone reads what it needs.

Each rank has a box in shared memory, in two halves. In every round it fills one half, says so, and waits until all
have; then it reads. It comes back to the same half two rounds later, when all have read it: so a round needs one
meeting of all ranks, or two if what they made of it is to be read as well.
"""

import numpy as np
import torch
from torch import Tensor

from tutti.errors import ReplicaMismatch
from tutti.transports.base import Work
from tutti.transports.shared_memory.transport import SharedMemoryTransport
from tutti.transports.sockets.frames import DTYPES

_HEAD, _ROW = 16, 32
_SHOWN, _MADE, _READ, _ASKED, _ENTRY = 0, 8, 16, 24, 4

Boxes = list[Tensor]
"""The bytes of every rank's box, by rank."""


class _Reached(Work):
    """Done when counters of all ranks have come to a value."""

    def __init__(self, rounds: "SharedMemoryRounds", slots: np.ndarray, value: int) -> None:
        self._rounds, self._slots, self._value = rounds, slots, value

    def done(self) -> bool:
        return self._rounds.flags.reached(self._slots, self._value)

    def wait(self) -> None:
        self._rounds.wait(self._slots, self._value)


class _Compared(_Reached):
    """And then all have come for the same."""

    def wait(self) -> None:
        super().wait()
        self._rounds.compare()


class SharedMemoryRounds:
    """The boxes of one conversation. Making it is collective, and so is every round, in the same order on all ranks."""

    def __init__(self, transport: SharedMemoryTransport, room: int, names: tuple[str, ...]) -> None:
        """Give every rank a box of twice `room` bytes, for rounds of these `names`."""
        self._transport, self._names = transport, names
        self.rank, self.size, self.room = transport.rank, transport.size, room
        boxes = transport.per_rank_tensors(2 * room, torch.uint8)
        self._halves = [[box[half * room :][:room] for box in boxes] for half in range(2)]
        self._typed: dict[tuple[int, torch.dtype], Boxes] = {}
        self.addresses = [np.array([box.data_ptr() for box in half]) for half in self._halves]
        """Of the boxes, in the halves that even and odd rounds use."""
        self.flags = transport.flags(_HEAD + _ROW * self.size)
        rows = _HEAD + _ROW * np.arange(self.size, dtype=np.int64)
        self._row = int(rows[self.rank])
        self._shown, self._made, self._read = rows + _SHOWN, rows + _MADE, rows + _READ
        self._entries = [rows + _ASKED + _ENTRY * half for half in range(2)]
        self._weights = np.ones(self.size)
        self.number = 0
        """Of the round under way, or of the next."""

    def boxes(self, dtype: torch.dtype) -> Boxes:
        """The boxes of this round as flat tensors."""
        key = self.number % 2, dtype
        if key not in self._typed:
            usable = self.room // dtype.itemsize * dtype.itemsize
            self._typed[key] = [box[:usable].view(dtype) for box in self._halves[key[0]]]
        return self._typed[key]

    def begin(self) -> Work:
        """Done when this rank may fill its box: all have read what was there."""
        return _Reached(self, self._read, self.number - 1)

    def shown(self, name: str, numel: int, dtype: torch.dtype) -> Work:
        """This rank's box is filled, for a round of that name. Done when everyone's is, and for the same; then read."""
        half = self.number % 2
        entry = int(self._entries[half][self.rank])
        self.flags.announce(entry, (self._names.index(name), numel, DTYPES.index(dtype)), 1.0)
        self.flags.publish(self._row + _SHOWN, self.number + 1)
        return _Compared(self, self._shown, self.number + 1)

    def made(self) -> Work:
        """This rank has put what it made in its box, where nobody else reads before. Done when all have."""
        self.flags.publish(self._row + _MADE, self.number + 1)
        return _Reached(self, self._made, self.number + 1)

    def end(self) -> None:
        """This rank has read what it needs."""
        self.flags.publish(self._row + _READ, self.number + 1)
        self.number += 1

    def compare(self) -> None:
        """Raise, on every rank, if they came to this round for different things."""
        half = self.number % 2
        if np.isnan(self.flags.weigh(self._entries[half], self._weights)):
            raise self._mismatch(half)

    def wait(self, slots: np.ndarray, value: int) -> None:
        """Wait until all slots hold `value`, for as long as those ranks live and the transport's timeout lasts."""
        ranks = range(self.size)
        self._transport.await_counters(self.flags, slots, value, ranks, "take part in a collective operation")

    def _mismatch(self, half: int) -> ReplicaMismatch:
        peers = self._transport.membership.peers
        asked = []
        for peer, entry in zip(peers, self._entries[half].tolist(), strict=True):
            kind, numel, code = self.flags.counters[entry : entry + 3].tolist()
            asked.append(f"rank {peer.rank}: {self._names[kind]} of {numel} × {DTYPES[code]}")
        return ReplicaMismatch(
            f"rank {self._transport.membership.me}: ranks call different operations, or with different tensors: "
            f"{'; '.join(asked)}. All ranks of a group call the same ones in the same order."
        )
