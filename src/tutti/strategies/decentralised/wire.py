"""What peers say to each other: heads of one length, each followed by as many bytes as it says."""

from dataclasses import dataclass
from enum import IntEnum, auto
from struct import Struct

import torch
from torch import Tensor

from tutti.errors import PacketError

HEAD, PAYLOAD = 1, 2
"""Tags: all that one peer says to another is in one order."""


class Kind(IntEnum):
    """What a peer says."""

    UPDATE = auto()
    """What the rank `origin` has changed in its step `number`."""
    TAKEN = auto()
    """I have applied all your updates up to `number`."""
    VALUES = auto()
    """My values at `clock`, as counted since meeting `number`, with their push-sum `weight`."""
    ASK = auto()
    """My values: meet me half-way."""
    ANSWER = auto()
    """That is how far I came to meet you; come as far."""
    ARRIVED = auto()
    """I wait in meeting `number`, for the purpose `origin`, at `clock`."""
    VALUE = auto()
    """What I bring to meeting `number`, at `clock`; nothing if I only want to know who is there."""
    RESULT = auto()
    """What has come of meeting `number`, for the purpose `origin`, to go on at `clock`."""
    AWAY = auto()
    """Do not wait for me."""
    BACK = auto()
    """Do so again."""
    GONE = auto()
    """I take `origin` for lost."""
    STOP = auto()
    """The loss on rank `origin` is not finite: everybody should stop."""
    BEAT = auto()
    """You wait in a meeting, and I am on my way."""
    BYE = auto()
    """This is the last you hear of me."""


_LAYOUT = Struct("<qqqqqd")


@dataclass(frozen=True)
class Head:
    """What comes first of every message."""

    kind: Kind
    number: int = 0
    origin: int = 0
    clock: int = 0
    num_bytes: int = 0
    """Of the payload."""
    weight: float = 1.0

    def pack(self) -> Tensor:
        fields = (self.kind, self.number, self.origin, self.clock, self.num_bytes, self.weight)
        return torch.frombuffer(bytearray(_LAYOUT.pack(*fields)), dtype=torch.uint8)

    @staticmethod
    def room() -> Tensor:
        return torch.empty(_LAYOUT.size, dtype=torch.uint8, device="cpu")

    @classmethod
    def read(cls, message: Tensor) -> "Head":
        """Raises `PacketError` if it is none."""
        kind, *fields = _LAYOUT.unpack(message.numpy().tobytes())
        try:
            return cls(Kind(kind), *fields)
        except ValueError:
            raise PacketError(f"a message of kind {kind}, which there is not") from None
