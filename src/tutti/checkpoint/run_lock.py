"""One writer per folder: a lock that names its holder, and ends with its process.

The lock is flock(2) on RUN/.lock. The kernel releases it when the holder ends, however that happens, so there is no
stale lock to remove by hand. A child made by fork, such as a DataLoader's worker, would share it and outlive the
holder for a while: the file is closed in children.
"""

import errno
import fcntl
import json
import logging
import os
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from weakref import WeakSet

from tutti.checkpoint.durable import explained_errors, named_errors
from tutti.errors import CheckpointError

_log = logging.getLogger("tutti")


class RunLock:
    """The right to write checkpoints into a folder, held until `close`."""

    def __init__(self, run: Path) -> None:
        """Take the lock, or raise `CheckpointError` with the name of the process that holds it."""
        path = run / ".lock"
        with explained_errors(f"write checkpoints to {run}"):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        _held.add(self)
        try:
            with explained_errors(f"write checkpoints to {run}"), named_errors(path):
                self._take(run)
        except BaseException:
            self.close_in_child()  # Closes the file, and forgets its number, which may soon be another file's.
            raise

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock. In a child made by fork this does nothing: the parent keeps it."""
        if self._file < 0:
            return
        file, self._file = self._file, -1
        with suppress(OSError):  # A full disk, or no locks: to close the file releases the lock too.
            os.ftruncate(file, 0)
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)

    def close_in_child(self) -> None:
        """Close the file in a process that was forked from the holder, which keeps the lock."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _take(self, run: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                _log.warning("%s is on a file system without locks: make sure that only one job writes to it.", run)
                return
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise CheckpointError(
                f"{run} is in use: {self._holder()} writes checkpoints to it. Wait for that job to end, or give this "
                "one another folder."
            ) from None
        holder = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(holder).encode(), 0)

    def _holder(self) -> str:
        try:
            holder = json.loads(os.pread(self._file, 4096, 0))
            return f"process {holder['pid']} on host {holder['host']}, since {holder['since']},"
        except (ValueError, KeyError, TypeError):
            return "another process"  # It has the lock, and has not written its name yet.


_held: WeakSet[RunLock] = WeakSet()
"""Per process, as forking is."""


def _close_in_child() -> None:
    for lock in list(_held):
        lock.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)
