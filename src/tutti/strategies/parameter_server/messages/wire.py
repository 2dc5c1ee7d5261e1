"""Message formats between workers and servers: headers of fixed length, each followed by the payload it announces.

Requests of one worker travel under one pair of tags, so a server handles them in the order in which they were sent.
Replies have tags per shard, so a worker can wait for one shard while others are under way.
"""

from dataclasses import dataclass
from enum import IntEnum, auto
from struct import Struct

import numpy as np
import torch
from torch import Tensor

REQUEST_TAG, PAYLOAD_TAG = 1, 2
"""Tags of requests: header, and payload if there is one."""
NORM_TAG, STATE_TAG, ORDER_TAG = 3, 4, 5
"""Tags of messages between servers (norms, order of updates), and of state transfers between servers and workers."""
COPY_TAG, COPY_PAYLOAD_TAG = 6, 7
"""Tags of messages from a server to the one that has copies of its shards: header, and mean gradient if any."""
_FIRST_REPLY_TAG = 16
"""From here on there are two tags for each shard; the tags above stay below this."""


def reply_tags(shard_index: int) -> tuple[int, int]:
    """Return the tags of replies about a shard: header, and payload."""
    return _FIRST_REPLY_TAG + 2 * shard_index, _FIRST_REPLY_TAG + 2 * shard_index + 1


class RequestKind(IntEnum):
    """What a worker asks of a server."""

    PUSH = auto()
    """Take a gradient of a shard and, unless `wanted_version` is `NO_PULL`, reply with the shard afterwards."""
    VOID = auto()
    """As `PUSH`, but without a gradient: the worker's step is void, and only counts."""
    BARRIER = auto()
    """When every living worker has sent this, reply to all with the same version of all shards."""
    LEAVE = auto()
    """Go on without this worker until it sends `JOIN`."""
    JOIN = auto()
    """Wait for this worker again, and reply with all shards."""
    SAVE_STATE = auto()
    """Send the optimiser's state."""
    LOAD_STATE = auto()
    """Receive parameters and the optimiser's state, and start again from them."""
    STOP = auto()
    """Stop every worker: the loss of this one is not finite."""
    DISCONNECT = auto()
    """This is the worker's last request."""
    # Between servers, to the copies of shards:
    COPY_STEP = auto()
    """Take this step on the copy of a shard, then reply to these workers."""
    COPY_REPLY = auto()
    """Reply to these workers about the copy of a shard."""
    COPY_END = auto()
    """There are no workers left, and this is the last message."""


class ReplyStatus(IntEnum):
    """What a server replies about a shard."""

    VALUES = auto()
    """The shard's values follow."""
    KEEP_ALIVE = auto()
    """Other workers are still on their way to the barrier: wait on."""
    REJECTED = auto()
    """The worker has sent a malformed request, and is removed."""
    STOPPED = auto()
    """A worker has asked all workers to stop; `version` is its rank."""
    LOST = auto()
    """A rank is lost, without which there will be no newer version; `version` is its rank in the world."""


NO_PULL = -1
"""The wanted version of a push that asks for no reply. Also fills unused entries of `ORDER_TAG` messages."""


@dataclass(frozen=True)
class RequestHeader:
    """The fixed part of a request."""

    kind: RequestKind
    shard: int = 0
    """Index of the shard that is pushed."""
    base_version: int = 0
    """Version of the shard that the gradient was computed from."""
    wanted_version: int = NO_PULL
    """The oldest version that the worker accepts as a reply."""
    num_bytes: int = 0
    """Bytes of the payload."""
    weight: float = 1.0
    """Samples that the gradient is the mean of."""
    norm: float = 0.0
    """Norm of the worker's whole gradient, where each update is clipped by itself."""
    is_synchronous: int = 0
    """1 in a step of the synchronous start, whose gradients are not compressed; else 0."""

    LAYOUT = Struct("<qqqqqddq")  # A multiple of 8 bytes: the options behind it are aligned for float64.


class RequestFormat:
    """Packs and parses requests: header, numeric options of the optimiser, and a flag per segment of the shard.

    All requests of a group have the same length, that of the shard with the most segments.
    """

    def __init__(self, num_options: int, num_flags: int) -> None:
        self._options_start = RequestHeader.LAYOUT.size
        self._flags_start = self._options_start + 8 * num_options
        self.num_bytes = self._flags_start + num_flags

    def pack(
        self, header: RequestHeader, options: np.ndarray | None = None, has_grad: np.ndarray | None = None
    ) -> Tensor:
        """Return a request as bytes."""
        # Zeros in the fields that a request does not use: what lies in memory by chance is not sent to other
        # processes.
        data = np.zeros(self.num_bytes, dtype=np.uint8)
        fields = (
            header.kind, header.shard, header.base_version, header.wanted_version, header.num_bytes, header.weight,
            header.norm, header.is_synchronous,
        )  # fmt: skip
        data[: self._options_start] = np.frombuffer(RequestHeader.LAYOUT.pack(*fields), dtype=np.uint8)
        if options is not None:
            data[self._options_start : self._flags_start].view(np.float64)[:] = options
        if has_grad is not None:
            data[self._flags_start : self._flags_start + len(has_grad)] = has_grad
        return torch.from_numpy(data)

    def empty(self) -> Tensor:
        """Return memory to receive a request."""
        return torch.empty(self.num_bytes, dtype=torch.uint8, device="cpu")

    def parse(self, message: Tensor) -> tuple[RequestHeader, np.ndarray, np.ndarray]:
        """Return a request's header, options and flags. Raises `ValueError` if its kind is unknown."""
        data = message.numpy()
        kind, *fields = RequestHeader.LAYOUT.unpack(data[: self._options_start].tobytes())
        # A view, which an update keeps: each request must be received into new memory (`empty`).
        options = data[self._options_start : self._flags_start].view(np.float64)
        return RequestHeader(RequestKind(kind), *fields), options, data[self._flags_start :].astype(bool)


# Little-endian, 40 bytes: status, version, staleness, bytes and leader, all as int64.
_REPLY_LAYOUT = Struct("<qqqqq")


@dataclass(frozen=True)
class ReplyHeader:
    """The fixed part of a reply about a shard."""

    status: ReplyStatus
    version: int = 0
    """Version of the shard; of a `STOPPED` reply, the rank whose loss is not finite; of a `LOST` one, the lost rank."""
    staleness: int = 0
    """Staleness of the worker's last applied update of the shard."""
    num_bytes: int = 0
    """Bytes of the payload."""
    leader: int = 0
    """The lowest rank of a living worker, as the server knows it."""

    def pack(self) -> Tensor:
        """Return the header as bytes."""
        data = bytearray(_REPLY_LAYOUT.pack(self.status, self.version, self.staleness, self.num_bytes, self.leader))
        return torch.frombuffer(data, dtype=torch.uint8)

    @staticmethod
    def empty() -> Tensor:
        """Return memory to receive a header."""
        return torch.empty(_REPLY_LAYOUT.size, dtype=torch.uint8, device="cpu")

    @classmethod
    def parse(cls, message: Tensor) -> "ReplyHeader":
        """Return the header that these bytes are."""
        status, *fields = _REPLY_LAYOUT.unpack(message.numpy().tobytes())
        return cls(ReplyStatus(status), *fields)
