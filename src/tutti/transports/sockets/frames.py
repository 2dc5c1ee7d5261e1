"""What goes over a connection: a hello, then messages, each a header and the bytes of a tensor."""

import socket
import struct
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tutti.transports.base import ANY

if TYPE_CHECKING:
    from tutti.transports.sockets.messenger import Receiving, Sending

HELLO = struct.Struct("<16sI")  # The receiver's token, the sender's rank.
HEADER = struct.Struct("<qQI")  # Tag, bytes, dtype.

DTYPES = sorted((value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=str)
"""All of torch's, in an order that every rank knows."""

CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


_SHORT_BYTES = 4096


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    flat = tensor.detach().reshape(-1)
    return memoryview((flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)).numpy())  # type: ignore[arg-type]


class FrameHeader:
    """What a header announced."""

    def __init__(self, src: int, tag: int, num_bytes: int, code: int) -> None:
        self.src, self.tag, self.num_bytes, self.code = src, tag, num_bytes, code
        self.buffer: bytearray | None = None  # Where it is kept until it is asked for.
        self.receiving: Receiving | None = None
        self.complete = False


class Incoming:
    """A connection that a peer opened, and what is being read from it."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.src = ANY  # Until it has said hello.
        self.moved_at = time.monotonic()
        self.head = bytearray(HELLO.size)
        self.rest = memoryview(self.head)
        self.message: FrameHeader | None = None
        self.held = False  # Whether `message` waits in the network until it is asked for.
        self._wakes_at = 1

    def wake_at(self, num_bytes: int) -> None:
        """Have the kernel say that there is something to read when there is so much; short messages come whole."""
        num_bytes = num_bytes if num_bytes > _SHORT_BYTES else 1
        if num_bytes != self._wakes_at:
            self._wakes_at = num_bytes
            with suppress(OSError):  # It only saves time.
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    def expect_header(self) -> None:
        self.wake_at(1)
        self.message = None
        self.head = bytearray(HEADER.size)
        self.rest = memoryview(self.head)


class Outgoing:
    """A connection to a peer, and what is still to be written to it."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.queue: deque[tuple[memoryview, Sending | None]] = deque()
        self.watched = False
