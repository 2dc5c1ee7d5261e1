"""Supervisor pipe: messages from a worker to the supervisor that started it.

How it works. Each worker has one pipe, on which it writes and the supervisor reads; nothing goes the other way. A
message is a header (one byte for its kind, eight for its length) and a payload. The kinds: progress (JSON numbers for
the watcher), a failure (JSON), the result of the function (pickled), whether the run tolerates the loss of this worker
(JSON), how long it needs to save its state when it is stopped (JSON), and that it leaves the run on purpose.

Only one process of a worker writes at a time; a message larger than the pipe is written in parts, while the supervisor
reads. The supervisor never waits for a message to be complete: `Inbox.feed` keeps the part that has come. The end of
the pipe says nothing about the worker, because its children may hold it open; the supervisor watches the process for
that.

A simulated rank has no pipe of its own: what it reports goes to a function of the process it runs in (`report_to`).
"""

import json
import os
import pickle
import struct
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from tutti.launch.pickling import packed_result

PIPE_VARIABLE = "TUTTI_SUPERVISOR_PIPE"
"""Environment variable with the file number of the worker's end of the pipe."""

IMPORTING = "TUTTI_IMPORTING"
"""Environment variable that is set while a worker imports the user's script, in which `launch` then does nothing."""

PARENT = "TUTTI_PARENT"
"""Environment variable with the number of the process that a worker must not outlive."""

HOST = "TUTTI_HOST"
"""Environment variable with the name of a worker's host, where that is not the machine's own name."""

Watcher = Callable[[int, dict[str, Any]], None]
"""A function that is called with a rank and the values it reported."""

_reporter: ContextVar[Callable[[dict[str, Any]], None] | None] = ContextVar("tutti_reporter", default=None)
"""Where reports of this thread go instead of the pipe: set in simulated ranks."""

# Little-endian, without padding: 9 bytes.
_HEADER = struct.Struct("<cQ")

_TOLERATES_LOSS, _FAILED, _LEAVES, _PROGRESS, _RESULT, _SAVES = b"E", b"F", b"L", b"P", b"R", b"S"


class Failure(NamedTuple):
    """How a worker's own code failed."""

    reason: str
    traceback: str
    knock_on: bool
    """Whether it failed only because another rank did."""
    is_mistake: bool = False
    """Whether a worker that is started in its place would fail in the same way."""
    ends_run: bool = False
    """Whether all other workers end for the same reason."""


def report_to(reporter: Callable[[dict[str, Any]], None]) -> None:
    """Send what this thread reports to a function of this process, and not over the pipe."""
    _reporter.set(reporter)


class SupervisorPipe:
    """The worker's end of the pipe. Without a supervisor, messages are dropped."""

    def __init__(self) -> None:
        number = os.environ.get(PIPE_VARIABLE)
        self._file = int(number) if number else None

    def tolerate_loss(self, yes: bool = True) -> None:
        """Have the run continue if this worker is lost; with False, its loss stops the run again.

        Does nothing in a simulated rank: one that dies as the cluster describes never stops the others.
        """
        if _reporter.get() is None:  # A simulation must not speak for the process it runs in.
            self._send(_TOLERATES_LOSS, json.dumps(yes).encode())

    def saves_when_stopped(self, grace_s: float) -> None:
        """Announce that this worker saves its state after SIGTERM, for which it needs `grace_s` seconds at most."""
        self._send(_SAVES, json.dumps(grace_s).encode())

    def leaves(self) -> None:
        """Announce that this worker ends before the training does, because it was asked to."""
        self._send(_LEAVES, b"")

    def failed(self, failure: Failure) -> None:
        """Report that this worker's code failed."""
        self._send(_FAILED, json.dumps(failure._asdict()).encode())

    def progress(self, **values: Any) -> None:
        """Report values, which must be valid JSON, to the function that watches the run."""
        # A simulated rank is a thread of this process, whose pipe would report for the wrong rank.
        if (reporter := _reporter.get()) is not None:
            reporter(values)
            return
        self._send(_PROGRESS, json.dumps(values).encode())

    def result(self, value: Any) -> None:
        """Send the worker's result. It is pickled: the pipe joins a process and its own child, and nobody else."""
        self._send(_RESULT, packed_result(value))

    def _send(self, kind: bytes, payload: bytes) -> None:
        if self._file is None:
            return
        # Blocks while the pipe is full. The supervisor always reads, and if it has died the kernel kills this process.
        data = memoryview(_HEADER.pack(kind, len(payload)) + payload)
        while data:
            data = data[os.write(self._file, data) :]


class Inbox:
    """The supervisor's end of the pipe: takes bytes, holds what the worker has reported so far."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.tolerates_loss = False
        self.ever_tolerated_loss = False
        """Whether it tolerated its loss at any time, even if it took that back."""
        self.grace_s = 0.0
        """Seconds that it gets to save its state when it is stopped."""
        self.has_left = False
        """Whether it ends before the training does, because it was asked to."""
        self.failure: Failure | None = None
        self.result: Any = None

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Take in bytes from the pipe; return the values of all progress messages that they complete."""
        self._buffer += data
        progress = []
        while len(self._buffer) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._buffer)
            # The rest of this message comes with a later read: a large result fills the pipe many times.
            if len(self._buffer) < _HEADER.size + length:
                break
            payload = bytes(self._buffer[_HEADER.size : _HEADER.size + length])
            del self._buffer[: _HEADER.size + length]
            if kind == _TOLERATES_LOSS:
                self.tolerates_loss = json.loads(payload)
                self.ever_tolerated_loss |= self.tolerates_loss
            elif kind == _FAILED:
                self.failure = Failure(**json.loads(payload))
            elif kind == _LEAVES:
                self.has_left = True
            elif kind == _SAVES:
                self.grace_s = json.loads(payload)
            elif kind == _PROGRESS:
                progress.append(json.loads(payload))
            else:
                self.result = pickle.loads(payload)
        return progress
