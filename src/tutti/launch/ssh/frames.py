"""Messages between a launcher and its agent on another host: a kind, the number of a worker, and a payload."""

import struct
from collections.abc import Iterator

MAGIC = b"tutti-agent 1\n"
"""The line with which the agent begins. What the shell of a host has printed before it is no message."""

PROBLEM = b"tutti-problem "
"""Begins a line before `MAGIC` that says why no agent can run."""

# To the agent: the program's payload, and a worker to start, a signal for one, a question whether an address is
# reached, and the end of the run.
PROGRAM, START, SIGNAL, REACH, CLOSE = b"A", b"S", b"K", b"Q", b"C"
# From the agent: what it found on its host, whether the address is reached, that a worker has started, what came of its
# stdout, its stderr and its supervisor pipe (nothing: no more comes), and its end.
REPORT, REACHED, STARTED, ENDED = b"R", b"Q", b"S", b"E"
STREAMS = (b"1", b"2", b"3")
# Both ways, to show that the other one is there.
PING = b"P"

PING_S = 1.0
"""How often each end sends something."""

_HEADER = struct.Struct("<cII")


class NotAFrame(Exception):
    """What came is no message of the other end: something else writes into the connection."""


def encode(kind: bytes, worker: int = 0, payload: bytes = b"") -> bytes:
    """Return a message as bytes."""
    return _HEADER.pack(kind, worker, len(payload)) + payload


class FrameReader:
    """Takes bytes, and returns the messages that they complete."""

    def __init__(self, max_bytes: int) -> None:
        """Refuse payloads that are longer than `max_bytes`."""
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, int, bytes]]:
        """Return kind, worker and payload of each message. Raises `NotAFrame`."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            kind, worker, length = _HEADER.unpack_from(self._buffer)
            if length > self._max_bytes:
                raise NotAFrame(f"a message of {length} bytes")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield kind, worker, payload
