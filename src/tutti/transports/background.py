"""A background thread that runs operations one after the other while the caller computes.

How it works
------------
`OperationThread.start` appends an operation to a queue and returns its `Work`. One daemon thread, created with the
first operation, takes them from the queue in order and runs each to its end: it waits for every work that the
operation yields. All ranks start their operations in the same order, so the n-th operation here meets the n-th one
elsewhere.

That order is also why a failure is final. If an operation fails, the peers may be in the middle of it, and running the
next one would match its messages with those of another operation. So after the first failure every later operation ends
at once with the same error (`_failure`), without being run.

Waits: the thread's waits have the deadlines of the transport, so the caller's wait for an operation needs none of its
own. `close` puts None behind the last operation and joins the thread. The transport must have been interrupted
before, so that the work under way fails; what is still queued then ends with `RankLost`. `_lock` orders `start`
against `close`: nothing is queued behind the None.
"""

import threading
from contextlib import AbstractContextManager
from queue import SimpleQueue

import torch

from tutti.coordination.activity import Activity
from tutti.errors import ConfigError, RankLost
from tutti.transports.base import Operation, Work


def run_operation(operation: Operation) -> None:
    """Run `operation` to its end in this thread. An error of a yielded work is raised at its `yield`."""
    failure: Exception | None = None
    while True:
        try:
            work = next(operation) if failure is None else operation.throw(failure)
        except StopIteration:
            return  # Also where the operation has caught the error and ended.
        failure = None
        try:
            work.wait()
        except Exception as error:
            # Thrown into the generator in the next round, so that it can clean up, or catch the error and continue.
            failure = error


class _QueuedOperation(Work):
    """An operation in the queue of an `OperationThread`, or under way there."""

    def __init__(self, operation: Operation, thread: "OperationThread") -> None:
        self.operation = operation
        self._thread = thread
        self.over = threading.Event()
        self.error: Exception | None = None

    def done(self) -> bool:
        return self.over.is_set()

    def wait(self) -> None:
        # No deadline is needed: each wait inside the operation ends by itself, and closing the transport ends them all.
        if not self.over.is_set():
            with self._thread.awaited():
                # Ended by the operation's thread: each wait inside it ends, and closing the transport ends all.
                self.over.wait()
        if self.error is not None:
            raise self.error


class OperationThread:
    """Runs operations in the order in which they were started, in one thread that is created when it is needed."""

    def __init__(self, name: str, activity: Activity) -> None:
        """Prepare the queue; `name` starts error messages and names the thread, whose waits `activity` reports."""
        self._name, self._activity = name, activity
        self._queue: SimpleQueue[_QueuedOperation | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None  # Written by the thread alone, once.
        self._closed = False
        self._lock = threading.Lock()

    def start(self, operation: Operation) -> Work:
        """Queue `operation` and return its work. Raises `ConfigError` if the thread was closed."""
        queued = _QueuedOperation(operation, self)
        with self._lock:  # So that nothing can be queued behind the None of `interrupt`.
            if self._closed:
                raise ConfigError(f"{self._name}: this transport is closed.")
            self._queue.put(queued)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
        return queued

    def awaited(self) -> AbstractContextManager[None]:
        """Report that the calling thread waits for this one."""
        return self._activity.waiting_for_thread(self._thread.ident if self._thread is not None else None)

    def interrupt(self) -> None:
        """Begin no operation after the one that is under way. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)

    def close(self) -> None:
        """Join the thread. The work it waits for must have been made to fail before. Idempotent."""
        self.interrupt()
        # An operation may close the transport itself, and a thread cannot join itself.
        if self._thread is not None and self._thread is not threading.current_thread():
            # Ended by the thread, once the operation under way has failed: the caller has closed what it waits for.
            self._thread.join()

    def _work(self) -> None:
        self._activity.in_background()
        # Autograd's mode is per thread, and enabled in a new one: in-place sums of gradients would be recorded.
        with torch.no_grad():
            # Ended by `interrupt`, which puts the None.
            while (queued := self._queue.get()) is not None:
                # Queued before the transport was closed: it ends with an error instead of being run.
                if self._closed and self._failure is None:
                    self._failure = self._closed_error()
                if self._failure is None:
                    self._run(queued)
                else:  # An earlier operation broke off: the messages of this one would not match the peers'.
                    queued.operation.close()
                    queued.error = self._failure
                # Last: a thread that this wakes reads the error.
                queued.over.set()
                del queued  # It holds tensors, and the queue may stay empty for long.

    def _run(self, queued: _QueuedOperation) -> None:
        try:
            run_operation(queued.operation)
        except Exception as error:
            # An operation that uses a closed transport gets ConfigError, as for a mistake of the caller. Here the
            # closing came in between, which is no mistake.
            closed_meanwhile = self._closed and isinstance(error, ConfigError)
            self._failure = queued.error = self._closed_error() if closed_meanwhile else error

    def _closed_error(self) -> RankLost:
        return RankLost(f"{self._name}: this transport was closed with work still to do.")
