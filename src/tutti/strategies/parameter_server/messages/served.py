"""What a server has of one piece: its values, who waits for them, and memory for what comes and goes."""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.collectives.compressed.messages import room
from tutti.strategies.parameter_server.ledger import Ledger
from tutti.strategies.parameter_server.pieces import Piece
from tutti.strategies.parameter_server.shard_optimizer import Stepper


class Pool:
    """Memory for what comes and goes of one size, from any thread: made when there is none, and used again."""

    def __init__(self, num_bytes: int, like: Tensor) -> None:
        self._num_bytes, self._like = num_bytes, like
        self._free: deque[Tensor] = deque()

    def take(self) -> Tensor:
        try:
            return self._free.pop()
        except IndexError:
            return room(self._num_bytes, self._like)

    def give(self, memory: Tensor) -> None:
        if memory.numel() == self._num_bytes:
            self._free.append(memory)


@dataclass(eq=False)
class Snapshot:
    """A piece as it was, for those who are being told of it."""

    version: int
    memory: Tensor
    readers: int = 0


class Served:
    """A piece, and all that its server knows of it."""

    def __init__(self, piece: Piece, ledger: Ledger, stepper: Stepper | None, like: Tensor) -> None:
        self.piece = piece
        self.ledger = ledger
        self.stepper = stepper
        """None where there are sizes alone."""
        self.pool = Pool(piece.num_bytes, like)
        self.asks: dict[int, int] = {}
        """The version that each worker waits for."""
        self.version = 0
        """Whose step has been taken: the ledger may have counted one whose step has not."""
        self.answered = -1
        """The version at which all of them were last looked at."""
        self.staleness: dict[int, int] = {}
        """Of each worker's last update."""
        self._snapshot: Snapshot | None = None

    def values(self) -> Tensor:
        """As bytes."""
        return self.pool.take() if self.stepper is None else self.stepper.values.view(torch.uint8)

    def snapshot(self) -> Snapshot:
        """The piece as it is now, to be given back."""
        old = self._snapshot
        if old is None or old.version != self.version:
            memory = self.pool.take()
            if self.stepper is not None:
                memory.copy_(self.stepper.values.view(torch.uint8))
            self._snapshot = Snapshot(self.version, memory)
            if old is not None and not old.readers:
                self.pool.give(old.memory)
        assert self._snapshot is not None
        self._snapshot.readers += 1
        return self._snapshot

    def give_back(self, snapshot: Snapshot) -> None:
        snapshot.readers -= 1
        if not snapshot.readers and snapshot is not self._snapshot:
            self.pool.give(snapshot.memory)

    def forget_snapshot(self) -> None:
        """What it holds is no longer so."""
        self._snapshot = None
