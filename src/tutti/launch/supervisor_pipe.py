"""What a worker tells the supervisor that started it, over a pipe of their own."""

import json
import os
import pickle
import struct
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

VARIABLE = "TUTTI_LINK"
"""Where a worker finds the number of its end of the pipe."""

IMPORTING = "TUTTI_IMPORTING"
"""Set while a worker imports the user's script, whose own call of `launch` must then do nothing."""

PARENT = "TUTTI_PARENT"
"""The process that a worker must not outlive."""

HOST = "TUTTI_HOST"
"""What the host of a worker is called, where that is not the machine's own name."""

Watcher = Callable[[int, dict[str, Any]], None]
"""Is told a rank, and what it reported."""

_tell: ContextVar[Callable[[dict[str, Any]], None] | None] = ContextVar("tutti_tell", default=None)

_HEADER = struct.Struct("<cQ")

_TOLERATES_LOSS, _FAILED, _PROGRESS, _RESULT = b"E", b"F", b"P", b"R"


class Failure(NamedTuple):
    """How a worker's own code failed."""

    reason: str
    traceback: str
    knock_on: bool
    """Whether it failed only because another rank did."""


def telling(whom: Callable[[dict[str, Any]], None]) -> None:
    """Let what this thread reports go to `whom`, who is in the same process, and nowhere else."""
    _tell.set(whom)


class SupervisorPipe:
    """A worker's end. Without a supervisor everything it is told goes nowhere."""

    def __init__(self) -> None:
        number = os.environ.get(VARIABLE)
        self._file = int(number) if number else None

    def tolerate_loss(self, yes: bool = True) -> None:
        """If this worker ends early, the others go on; with False, its loss stops them again.

        Simulated ranks have no need to say so: one that dies as the cluster says never stops the others.
        """
        if _tell.get() is None:  # A simulation must not speak for the process it runs in.
            self._send(_TOLERATES_LOSS, json.dumps(yes).encode())

    def failed(self, failure: Failure) -> None:
        self._send(_FAILED, json.dumps(failure._asdict()).encode())

    def progress(self, **values: Any) -> None:
        """Numbers for whoever watches; JSON."""
        if (tell := _tell.get()) is not None:
            tell(values)
            return
        self._send(_PROGRESS, json.dumps(values).encode())

    def result(self, value: Any) -> None:
        """The worker's result: pickled, but only ever between a process and its own child, over a pipe."""
        self._send(_RESULT, pickle.dumps(value))

    def _send(self, kind: bytes, payload: bytes) -> None:
        if self._file is None:
            return
        data = memoryview(_HEADER.pack(kind, len(payload)) + payload)
        while data:
            data = data[os.write(self._file, data) :]


class Inbox:
    """The supervisor's end: bytes in, what the worker said out."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.tolerates_loss = False
        self.ever_tolerated_loss = False
        """At any time, whatever it said later."""
        self.failure: Failure | None = None
        self.result: Any = None

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Take in what was read; returns the progress messages in it."""
        self._buffer += data
        progress = []
        while len(self._buffer) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._buffer)
            if len(self._buffer) < _HEADER.size + length:
                break
            payload = bytes(self._buffer[_HEADER.size : _HEADER.size + length])
            del self._buffer[: _HEADER.size + length]
            if kind == _TOLERATES_LOSS:
                self.tolerates_loss = json.loads(payload)
                self.ever_tolerated_loss |= self.tolerates_loss
            elif kind == _FAILED:
                self.failure = Failure(**json.loads(payload))
            elif kind == _PROGRESS:
                progress.append(json.loads(payload))
            else:
                self.result = pickle.loads(payload)
        return progress
