"""Sends and receives in progress, and messages that are being read from a connection."""

from typing import TYPE_CHECKING

from torch import Tensor

from tutti.transports.base import Work

if TYPE_CHECKING:
    from tutti.transports.sockets.messenger import Messenger


class SocketSend(Work):
    """A message on its way out. It is finished when the kernel has taken all of its bytes."""

    awaited_action = "take a message"

    def __init__(self, messenger: "Messenger", dst: int, tensor: Tensor) -> None:
        self.messenger, self.peer = messenger, dst
        self.finished = False
        self._tensor = tensor  # Keeps the memory alive from which the kernel still reads.

    @property
    def peer_lost(self) -> bool:
        """Whether the peer no longer takes what is sent, so that the work can never finish."""
        return self.peer in self.messenger.broken

    def done(self) -> bool:
        return self.messenger.poll(self)

    def wait(self) -> None:
        self.messenger.wait(self)


class SocketReceive(Work):
    """A receive that was posted, and the message that it was matched with."""

    awaited_action = "send a message"

    def __init__(self, messenger: "Messenger", src: int, tensor: Tensor) -> None:
        self.messenger = messenger
        self.requested_source = src
        """The rank that the caller asked for, or `ANY`."""
        self.peer = src
        """The sender; `ANY` until a message was matched."""
        self.tensor = tensor
        self.finished = False
        self.error: Exception | None = None

    @property
    def peer_lost(self) -> bool:
        """Whether the peer's connection is over, so that the work can never finish."""
        return self.peer in self.messenger.ended

    def done(self) -> bool:
        return self.messenger.poll(self)

    def wait(self) -> None:
        self.messenger.wait(self)
        if self.error is not None:
            raise self.error

    @property
    def source(self) -> int:
        self.wait()
        return self.peer


class IncomingMessage:
    """A message whose header has been read."""

    def __init__(self, src: int, tag: int, num_bytes: int, dtype_code: int) -> None:
        self.src, self.tag, self.num_bytes, self.dtype_code = src, tag, num_bytes, dtype_code
        self.memory: memoryview | None = None
        """Where it is read to; None if it is dropped, because it does not fit its receive."""
        self.is_kept = False
        """Whether `memory` is a buffer of its own, and not that of a receive."""
        self.receive: SocketReceive | None = None
        """The receive it was matched with."""
        self.complete = False
        """Whether all of its bytes have been read."""
