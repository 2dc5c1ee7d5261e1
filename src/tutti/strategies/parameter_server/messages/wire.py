"""What workers and servers say to each other: fixed heads, each followed by as many bytes as it says."""

from dataclasses import dataclass
from enum import IntEnum, auto
from struct import Struct

import numpy as np
import torch
from torch import Tensor

HEAD, PAYLOAD = 1, 2
"""Tags of what a worker says to a server: all of it in one order."""
NORM, STATE, ORDER = 3, 4, 5
"""Of what servers say to each other, but for STATE."""
_REPLIES = 16


def reply_tags(piece: int) -> tuple[int, int]:
    """Of what a server says of a piece: head, and payload."""
    return _REPLIES + 2 * piece, _REPLIES + 2 * piece + 1


class Kind(IntEnum):
    """What a worker says."""

    PUSH = auto()
    """A gradient of a piece, and perhaps the wish to read it afterwards."""
    MEET = auto()
    """Wait for the others, who come here too, and tell all of us the same."""
    LEAVE = auto()
    """Go on without me."""
    JOIN = auto()
    """Count me in, and tell me all pieces."""
    SAVE = auto()
    """Tell me what the optimiser remembers."""
    LOAD = auto()
    """Take these parameters, and what the optimiser remembers."""
    STOP = auto()
    """My loss is not finite: everybody should stop."""
    BYE = auto()
    """This is the last you hear of me."""


class Status(IntEnum):
    """What a server replies."""

    HERE = auto()
    """The piece follows."""
    BEAT = auto()
    """The others are on their way."""
    DROPPED = auto()
    """You have sent what cannot be: you take no part any more."""
    STOPPED = auto()
    """A rank has asked everybody to stop."""


NOTHING = -1
"""In place of the version that a worker wants to read."""


@dataclass(frozen=True)
class Head:
    """What a worker says first."""

    kind: Kind
    piece: int = 0
    base: int = 0
    wanted: int = NOTHING
    num_bytes: int = 0
    """Of the payload."""
    weight: float = 1.0
    norm: float = 0.0

    LAYOUT = Struct("<qqqqqdd")


class Heads:
    """Packs heads, with an optimiser's options and the marks of a piece; all are of one length."""

    def __init__(self, num_options: int, num_marks: int) -> None:
        self._num_options = num_options
        self._num_marks = num_marks
        self._options_at = Head.LAYOUT.size
        self._marks_at = self._options_at + 8 * num_options
        self.num_bytes = self._marks_at + num_marks

    def pack(self, head: Head, options: np.ndarray | None = None, marks: np.ndarray | None = None) -> Tensor:
        data = np.zeros(self.num_bytes, dtype=np.uint8)
        fields = (head.kind, head.piece, head.base, head.wanted, head.num_bytes, head.weight, head.norm)
        data[: self._options_at] = np.frombuffer(Head.LAYOUT.pack(*fields), dtype=np.uint8)
        if options is not None:
            data[self._options_at : self._marks_at].view(np.float64)[:] = options
        if marks is not None:
            data[self._marks_at : self._marks_at + len(marks)] = marks
        return torch.from_numpy(data)

    def room(self) -> Tensor:
        return torch.empty(self.num_bytes, dtype=torch.uint8, device="cpu")

    def read(self, message: Tensor) -> tuple[Head, np.ndarray, np.ndarray]:
        """A head, options and marks. Raises `ValueError` if it is none."""
        data = message.numpy()
        kind, *fields = Head.LAYOUT.unpack(data[: self._options_at].tobytes())
        options = data[self._options_at : self._marks_at].view(np.float64)
        return Head(Kind(kind), *fields), options, data[self._marks_at :].astype(bool)


REPLY = Struct("<qqqqq")
"""Status, version, staleness of the reader's last update, bytes of the payload, the first worker that is left."""


@dataclass(frozen=True)
class Reply:
    """What a server says first."""

    status: Status
    version: int = 0
    staleness: int = 0
    num_bytes: int = 0
    leader: int = 0

    def pack(self) -> Tensor:
        data = bytearray(REPLY.pack(self.status, self.version, self.staleness, self.num_bytes, self.leader))
        return torch.frombuffer(data, dtype=torch.uint8)

    @staticmethod
    def room() -> Tensor:
        return torch.empty(REPLY.size, dtype=torch.uint8, device="cpu")

    @classmethod
    def read(cls, message: Tensor) -> "Reply":
        status, *fields = REPLY.unpack(message.numpy().tobytes())
        return cls(Status(status), *fields)
