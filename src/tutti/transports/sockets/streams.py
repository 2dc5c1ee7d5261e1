"""Connections with one peer, and the state of reading from or writing to them; plain or TLS.

TLS differs in four ways, which are hidden here as far as possible:
- Bytes may be decrypted and not read yet. The selector does not see them: `has_buffered` tells.
- A part of a record may have been taken from the kernel: then fewer bytes are left there than of the message, and the
  kernel's threshold for waking up must be lower.
- A write that the kernel did not take must be repeated with the same bytes. `_retried` keeps them.
- A connection that failed reads like one that was closed (CPython's `SSL_read_ex` loses the error): `failure` tells.
"""

import socket
import ssl
import struct
import time
from collections import deque
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from tutti.coordination.handshake import set_timeouts
from tutti.transports.sockets.frames import HEADER
from tutti.transports.sockets.messages import IncomingMessage, SocketSend

_WAKE_BYTES = 64 * 2**10
"""A slow link delivers a large message one packet at a time. The waiting thread is woken once for this much of it."""
_SHORT_BYTES = 4096
"""Up to this size no wake-up threshold is set: such messages arrive whole."""
_MAX_BUFFERS = 8
"""Byte ranges handed to one `sendmsg` call."""
_RECORD_BYTES = 16 * 2**10
"""The payload of a TLS record at most. Byte ranges that are shorter are joined to records of this size."""
_CHUNK_BYTES = 256 * 2**10
"""Bytes handed to one call of TLS."""
_DROPPED_AT_ONCE = 64 * 2**10

_TCP_INFO = struct.Struct("<8B13I")
"""The start of the kernel's `tcp_info`, up to the time since the last acknowledgement."""
_TCP_CLOSE = 7
"""The state of a connection that was reset, or that the kernel has given up."""


class _TcpInfo(NamedTuple):
    state: int
    num_retransmissions: int
    num_unacknowledged: int
    acknowledged_ms: int
    """Time since the last acknowledgement came."""


def _tcp_info(connection: socket.socket) -> _TcpInfo:
    fields = _TCP_INFO.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
    return _TcpInfo(fields[0], fields[2], fields[12], fields[20])


class IncomingConnection:
    """A connection that a rank opened, and the state of reading from it."""

    def __init__(self, connection: socket.socket, src: int) -> None:
        self.socket, self.src = connection, src
        self.progressed_at = time.monotonic()
        self.message: IncomingMessage | None = None
        """The one whose payload is being read."""
        self.secure = isinstance(connection, ssl.SSLSocket)
        self.num_dropped = 0
        """Bytes behind `unread` that belong to a payload that nobody wants."""
        self._wakes_at = 1
        self.expect_header()

    def expect_header(self) -> None:
        """Read a header next."""
        self._wake_at(1)
        self.message = None
        self.head = bytearray(HEADER.size)
        self.unread = memoryview(self.head)
        """The memory that is to be filled next."""

    def expect_payload(self, message: IncomingMessage) -> None:
        """Read the payload of `message` next: into its memory, or to be dropped if it has none."""
        if message.memory is not None:
            self.unread = message.memory
        else:
            self.num_dropped = message.num_bytes
            self.drop_more()
        self.wake_for_rest()

    def drop_more(self) -> bool:
        """Read the next part of a payload that nobody wants."""
        count = min(self.num_dropped, _DROPPED_AT_ONCE)
        self.num_dropped -= count
        self.unread = memoryview(bytearray(count))
        return True

    def wake_for_rest(self) -> None:
        """Be woken when some of `unread` has come, not for each packet of it."""
        # Never more than is left of the message: its sender may wait for a reply before it sends more.
        self._wake_at(min(self.unread.nbytes, _WAKE_BYTES))

    @property
    def has_buffered(self) -> bool:
        """Whether there are bytes to read that the kernel does not know of."""
        return isinstance(self.socket, ssl.SSLSocket) and self.socket.pending() > 0

    def failure(self) -> str | None:
        """Why a stream that has ended was not closed by the peer but failed; None if it was closed."""
        if not self.secure:
            return None  # Reading has raised it.
        info = _tcp_info(self.socket)
        if info.state != _TCP_CLOSE:  # A connection that the peer closed, and this rank did not, is in CLOSE_WAIT.
            return None
        return f"its connection failed {info.acknowledged_ms / 1000:.1f} s after its host last answered"

    def _wake_at(self, num_bytes: int) -> None:
        """Let the kernel report the socket as readable only when `num_bytes` are there."""
        if self.secure:
            num_bytes -= 2 * _RECORD_BYTES
        num_bytes = num_bytes if num_bytes > _SHORT_BYTES else 1
        if num_bytes != self._wakes_at:
            self._wakes_at = num_bytes
            with suppress(OSError):  # It is only an optimisation.
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)


class OutgoingConnection:
    """A connection to a peer, and the bytes that are still to be written to it."""

    def __init__(self, connection: socket.socket, hello: bytes, patience_s: float) -> None:
        """Use a connected socket for messages, after `hello`."""
        connection.setblocking(False)
        set_timeouts(connection, patience_s)
        # With this limit the kernel also ends connections to a rank that is there and does not read, however long it
        # has reason to. `is_cut_off` looks for the other case.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        self.socket = connection
        self.queue: deque[tuple[memoryview, SocketSend | None]] = deque([(memoryview(hello), None)])
        """Byte ranges, each with the send that it finishes."""
        self.watched = False
        """Whether it is registered for writing, because the kernel's buffer was full."""
        self._secure = isinstance(connection, ssl.SSLSocket)
        self._retried: memoryview | None = None
        self._patience_s = patience_s

    def write(self) -> None:
        """Write as much of the queue as the kernel takes at once. Raises `BlockingIOError` if it takes no more."""
        # Several ranges in one call, so that a header and its payload leave in one packet.
        sent = (
            self._write_record()
            if self._secure
            else self.socket.sendmsg([data for data, _ in islice(self.queue, _MAX_BUFFERS)])
        )
        while sent:
            data, send = self.queue.popleft()
            if sent < data.nbytes:  # The kernel's buffer is full: the rest of this range goes first next time.
                self.queue.appendleft((data[sent:], send))
                break
            sent -= data.nbytes
            if send is not None:
                send.finished = True

    def _write_record(self) -> int:
        if self._retried is None:
            self._retried = self._first_bytes()
        try:
            sent = self.socket.send(self._retried)
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            raise BlockingIOError from None
        self._retried = None
        return sent

    def _first_bytes(self) -> memoryview:
        """What to write next: one large range, or several short ones in one record."""
        first = self.queue[0][0]
        if first.nbytes >= _RECORD_BYTES or len(self.queue) == 1:
            return first[:_CHUNK_BYTES]
        joined = bytearray()
        for data, _ in self.queue:
            joined += data[: _RECORD_BYTES - len(joined)]
            if len(joined) == _RECORD_BYTES:
                break
        return memoryview(joined)

    def is_cut_off(self) -> bool:
        """Whether the peer's host has acknowledged nothing of what was sent for the patience of the job."""
        info = _tcp_info(self.socket)
        waits = info.num_retransmissions > 0 and info.num_unacknowledged > 0
        return waits and info.acknowledged_ms > 1000 * self._patience_s
