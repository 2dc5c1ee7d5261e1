"""Message format between peers: a header of fixed length, followed by the payload that it announces.

All messages from one peer to another travel under one pair of tags, so they are handled in the order of sending.
"""

from dataclasses import dataclass
from enum import IntEnum, auto
from struct import Struct

import torch
from torch import Tensor

from tutti.errors import PacketError

HEADER_TAG, PAYLOAD_TAG = 1, 2


class PeerMessageKind(IntEnum):
    """What a peer sends, and the fields of the header that it uses."""

    UPDATE = auto()
    """What the rank `origin` changed in its step `number`."""
    ACKNOWLEDGE = auto()
    """The sender has applied all updates of the receiver up to `number`."""
    VALUES = auto()
    """The sender's values at `clock`, counted since averaging round `number`, with their push-sum `weight`."""
    PAIR_REQUEST = auto()
    """The sender's values, to be averaged with the receiver's."""
    PAIR_REPLY = auto()
    """The change that pair averaging made to the replier's values; the requester subtracts it from its own."""
    ROUND_ENTERED = auto()
    """The sender waits in averaging round `number`, for the purpose `origin`, at `clock`."""
    ROUND_VALUE = auto()
    """The sender's values for averaging round `number`, at `clock`; no payload if it only regroups."""
    ROUND_RESULT = auto()
    """The result of averaging round `number`, for the purpose `origin`, to continue at `clock`."""
    LEAVE = auto()
    """Do not wait for the sender until it sends `JOIN`."""
    JOIN = auto()
    """Wait for the sender again."""
    LOST = auto()
    """The sender takes the rank `origin` for lost."""
    STOP = auto()
    """The loss on rank `origin` is not finite: all ranks stop."""
    KEEP_ALIVE = auto()
    """The receiver waits in an averaging round, and the sender is still on its way there."""
    DISCONNECT = auto()
    """This is the sender's last message."""


# Little-endian, 56 bytes: kind, number, origin, clock and bytes as int64, the weight as float64, and steps as int64.
_LAYOUT = Struct("<qqqqqdq")


@dataclass(frozen=True)
class PeerMessageHeader:
    """The fixed part of a message. `PeerMessageKind` says what the fields mean."""

    kind: PeerMessageKind
    number: int = 0
    """Number of an update or an averaging round."""
    origin: int = 0
    """A rank, or the purpose of an averaging round."""
    clock: int = 0
    """Number of steps taken by the sender."""
    num_bytes: int = 0
    """Bytes of the payload."""
    weight: float = 1.0
    """Push-sum weight."""
    steps: int = 0
    """Of values: the sender's steps that are in them. Not its clock, which rounds make equal on all ranks."""

    def pack(self) -> Tensor:
        """Return the header as bytes."""
        fields = (self.kind, self.number, self.origin, self.clock, self.num_bytes, self.weight, self.steps)
        # A bytearray, because torch warns of memory that cannot be written.
        return torch.frombuffer(bytearray(_LAYOUT.pack(*fields)), dtype=torch.uint8)

    @staticmethod
    def empty() -> Tensor:
        """Return memory to receive a header."""
        return torch.empty(_LAYOUT.size, dtype=torch.uint8, device="cpu")

    @classmethod
    def parse(cls, message: Tensor) -> "PeerMessageHeader":
        """Return the header that these bytes are. Raises `PacketError` if its kind is unknown."""
        # The caller receives into `empty()`, so the length is right; only the fields can be wrong.
        kind, *fields = _LAYOUT.unpack(message.numpy().tobytes())
        try:
            return cls(PeerMessageKind(kind), *fields)
        except ValueError:
            raise PacketError(f"a message of unknown kind {kind}") from None
