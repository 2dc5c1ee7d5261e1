"""`BackgroundWriter`: writes checkpoints beside training.

How it works. Only ranks that write have one: the leader, or each rank that saves a part of a split model. The training
loop hands over a snapshot, which is a copy that nobody else changes, and goes on; one thread writes it. There is at
most one snapshot in the thread's hands and none in a queue: `memory` waits for the one before and gives it back for the
next copy to overwrite, so there is one copy of the state at most. `busy` tells a caller who would rather skip.

A failed write (a full disk, say) is logged when it happens and leaves the earlier checkpoints as they are. Training
goes on, and the next submission tries again. `close` waits for the thread, and raises the error of the last snapshot
if that one was not written: a run must not end well without the checkpoint that it asked for.
"""

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from weakref import WeakSet

from tutti.checkpoint.copies import Layout, TensorCopies
from tutti.checkpoint.parts import PartRanks, PartWriter
from tutti.checkpoint.snapshots import EncodedSnapshot
from tutti.checkpoint.storage import CheckpointWriter
from tutti.errors import CheckpointError

_log = logging.getLogger("tutti")


_open: "WeakSet[BackgroundWriter]" = WeakSet()
"""All writers of this process."""


def wait_for_all() -> None:
    """Wait until all snapshots of this process are written, before it ends without the interpreter's own exit."""
    for writer in list(_open):
        writer.wait()  # Ended by the write, which the disk ends.


class BackgroundWriter:
    """The writer of a run's checkpoints, in a thread of its own until `close`."""

    def __init__(self, run: Path, keep: int, ranks: PartRanks | None = None, continues: bool = True) -> None:
        """Lock the folder. Raises `CheckpointError` if another process writes to it.

        Args:
            ranks: those that write together, each its part; the first of them leads, and locks the folder.
            continues: whether checkpoints that are in the folder are of the same run.
        """
        self._writer: CheckpointWriter | PartWriter
        if ranks is None or ranks.leads:
            self._writer = CheckpointWriter(run, keep, None if ranks is None else ranks.transport, continues)
        else:
            self._writer = PartWriter(run, keep, ranks.transport)
        self._thread = ThreadPoolExecutor(1, "tutti-checkpoint") if ranks is None else ranks.thread
        self._ranks = ranks
        self._pending: Future[Path] | None = None
        self._last: TensorCopies | None = None
        """The tensors of the last snapshot: in the thread's hands until it is idle, then free to be overwritten."""
        _open.add(self)
        self.seconds = 0.0
        """How long the last checkpoint took to write."""

    @property
    def keep(self) -> int:
        """How many checkpoints stay."""
        return self._writer.keep

    @keep.setter
    def keep(self, number: int) -> None:
        self._writer.keep = number

    @property
    def busy(self) -> bool:
        """Whether a snapshot is being written."""
        return self._pending is not None and not self._pending.done()

    @property
    def layout(self) -> Layout | None:
        """The layout of the last snapshot, which may be being written; None if there is none."""
        return None if self._last is None else self._last.layout

    def memory(self) -> TensorCopies | None:
        """Wait until the last snapshot is written, and return its tensors, which the next one may overwrite."""
        self.wait()
        last, self._last = self._last, None
        return last

    def submit(self, snapshot: EncodedSnapshot) -> None:
        """Have a snapshot written, after the one before. The caller must not change its tensors until `memory`."""
        self.wait()
        self._last = snapshot.copies
        if self._ranks is not None and self._ranks.transport.cluster is not None:
            # Messages in virtual time belong to the thread of the simulated rank.
            self._pending = Future()
            try:
                self._pending.set_result(self._write(snapshot))
            except CheckpointError as error:
                self._pending.set_exception(error)
            return
        self._pending = self._thread.submit(self._write, snapshot)

    def flush(self) -> Path | None:
        """Wait for the last snapshot, and return its folder. Raises `CheckpointError` if it was not written."""
        # Ended by the write, which the disk ends.
        return None if self._pending is None else self._pending.result()

    def close(self) -> None:
        """Wait for the last snapshot, and let others write. Raises `CheckpointError` if it was not written."""
        try:
            self.flush()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Wait for the last snapshot, and let others write, without a word about an error that was logged."""
        self.wait()
        if self._ranks is None:
            self._thread.shutdown()
        self._pending = self._last = None
        self._writer.close()

    def wait(self) -> None:
        """Wait until the thread is idle."""
        if self._pending is not None:
            self._pending.exception()  # Ended by the write, which the disk ends.

    def _write(self, snapshot: EncodedSnapshot) -> Path:
        start_s = time.perf_counter()
        if self._ranks is not None:
            self._ranks.transport.activity.in_background()  # Waits of this thread do not stop training.
        try:
            return self._writer.write(snapshot)
        except CheckpointError as error:
            _log.error("%s Training goes on, and earlier checkpoints are as they were.", error)
            raise
        except Exception as error:  # Memory that is used up, for example: nobody would hear of it.
            _log.exception("no checkpoint of step %d, but training goes on:", snapshot.steps)
            raise CheckpointError(f"the checkpoint of step {snapshot.steps} was not written: {error!r}") from error
        finally:
            self.seconds = time.perf_counter() - start_s
