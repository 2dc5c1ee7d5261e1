"""The operation queue of a process group: collectives run one after the other, messages concurrently.

How it works
------------
Collectives of a group run in the order in which they were called, because their messages are matched by order. `_busy`
says that a thread runs a collective, or is about to; it changes under `_lock`. A new collective

- runs in the calling thread, if the caller blocks anyway and nothing is running: no thread switch;
- otherwise joins `_queue`. If nothing is running, a thread of the pool is asked to run the queue.

The thread that runs collectives takes the next from the queue until it is empty (`_next_queued`), and then gives
`_busy` up. If it ran a caller's own collective and others were queued meanwhile, it hands them to the pool and
returns.

After a failure the group is out of step with its peers. So `_failure` is kept, and every later collective ends with it
without being run. An exception that is no `Exception` (a signal's KeyboardInterrupt) cuts a collective short in the
middle and counts as a failure too; in the main thread it is raised.

Messages are spawned on a channel of their own. The thread that waits for one drives the channel's event loop, or the
loop's own thread does. Their operations have no deadline; the wait has one (`timeout_s`), and for a future, which
no thread may be waiting for, `_expire_later` spawns an operation that fails it in time.

Completing a work may run callbacks of the user's futures, which may start collectives and wait for them. No thread does
that while it has other work to do: the event loop gives callbacks to the pool, and a thread that runs collectives first
hands the rest of the queue to another thread.

Closing: the transport is interrupted before, so every running operation fails. Then `close` sets `_failure`, joins the
pool, and completes the messages whose operations were never begun.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from weakref import WeakSet

import torch

from tutti.backend.thread_pool import ThreadPool
from tutti.backend.work import BackendWork
from tutti.errors import ConfigError, RankLost, TuttiError
from tutti.transports.background import run_operation
from tutti.transports.base import Operation, Transport, Work
from tutti.transports.capabilities import SpawnsInline
from tutti.transports.event_loop import DrivableWork


class OperationQueue(ABC):
    """Runs the operations of a group, and completes the work of each when it is over."""

    @abstractmethod
    def submit_collective(self, work: BackendWork, operation: Operation, blocking: bool) -> None:
        """Run `operation` after the collectives before it; `blocking`: the caller waits for it anyway."""

    @abstractmethod
    def submit_message(self, work: BackendWork, operation: Operation) -> None:
        """Run the `operation` of a message concurrently with everything else."""

    @abstractmethod
    def close(self) -> None:
        """Run no more operations; those in progress fail. The transport has been interrupted before. Idempotent."""


class RealTimeQueue(OperationQueue):
    """The operation queue of a group in real time."""

    def __init__(self, messages: Transport, world_rank: int) -> None:
        """Send messages over `messages`, which nothing else uses; `world_rank` is for error messages."""
        # Inline where the transport can: a message that is ready then needs no other thread.
        self._spawn = (
            messages.spawn_inline if isinstance(messages, SpawnsInline) else partial(messages.spawn, deadline=False)
        )
        self._world_rank, self._timeout_s = world_rank, messages.timeout.total_seconds()
        self._pool = ThreadPool(f"rank {world_rank}, collectives")
        self._lock = threading.Lock()
        self._queue: deque[tuple[BackendWork, Operation]] = deque()
        self._busy = False  # Whether a thread runs collectives, or is about to.
        self._failure: Exception | None = None
        self._messages: WeakSet[BackendWork] = WeakSet()  # Messages in progress.

    def submit_collective(self, work: BackendWork, operation: Operation, blocking: bool) -> None:
        # Decided under the lock: of two callers that find the queue free, one would otherwise overtake the other.
        with self._lock:
            failure, free = self._failure, not self._busy
            if failure is None:
                self._busy = True
                if not (blocking and free):
                    self._queue.append((work, operation))
        if failure is not None:
            work.complete(failure)
        elif blocking and free:
            self._run_here(work, operation)
        elif free:
            self._run_queue_elsewhere()

    def submit_message(self, work: BackendWork, operation: Operation) -> None:
        work.timeout_s, work.on_future = self._timeout_s, self._expire_later  # The operation itself has no deadline.
        # From here on the operation may complete the work, in any thread: what the work needs for that is set above.
        spawned = self._spawn(self._completing(work, operation))
        if isinstance(spawned, DrivableWork):
            work.drive = spawned.drive
        self._messages.add(work)

    def close(self) -> None:
        with self._lock:
            # Overwrites an earlier failure: calls from now on are mistakes of this rank, whatever happened before.
            self._failure = ConfigError(f"rank {self._world_rank}: this process group was destroyed.")
        self._pool.close()
        for work in list(self._messages):  # Closing a generator that was never begun runs nothing inside it.
            self._complete(work, self._destroyed_error())

    def _run_here(self, work: BackendWork, operation: Operation) -> None:
        """Run a collective in the calling thread, which holds `_busy`, and hand on what was queued meanwhile."""
        try:
            error = self._run(operation)
        finally:  # Also after KeyboardInterrupt: others may wait for what was queued meanwhile.
            # The caller goes on with its own work: it must not run collectives that others have queued.
            if self._next_queued():
                self._run_queue_elsewhere()
        work.complete(error)  # No future can have been taken: the caller does not have the work yet.

    def _run_queue(self) -> None:
        """Run the queued collectives, in order."""
        while self._next_queued():
            work, operation = self._queue.popleft()
            try:
                error = self._run(operation)
            except BaseException as failure:  # It ends here: this is a thread of the pool.
                error = self._failure or _cut_short_error(self._world_rank, failure)
            set_future = work.complete(error)
            del work, operation  # They hold tensors.
            if set_future is not None:
                # The callbacks may wait for a collective that is queued: another thread must be able to run it.
                handed_over = not self._next_queued() or self._pool.submit(self._run_queue)
                set_future()
                if handed_over:
                    return

    def _run_queue_elsewhere(self) -> None:
        """Let a thread of the pool run the queue, or run it here if there is none."""
        self._pool.copy_num_threads()
        # The pool is closed: nobody else would complete what is queued.
        if not self._pool.submit(self._run_queue):
            self._run_queue()

    def _next_queued(self) -> bool:
        """Whether another collective is queued for the thread that runs them; if not, it gives `_busy` up."""
        with self._lock:
            # Under the lock: a collective that is submitted now either finds `_busy` set, or starts a thread itself.
            self._busy = bool(self._queue)
            return self._busy

    def _run(self, operation: Operation) -> Exception | None:
        """Run a collective, unless one before it failed; return what went wrong."""
        if self._failure is not None:  # Its messages would match those of another collective.
            return self._failure
        try:
            # Out of the caller's inference mode: another thread may run the next collective, with tensors of this one.
            with torch.inference_mode(False), torch.no_grad():
                run_operation(operation)
        except Exception as error:
            return self._fail(error)
        except BaseException as error:  # Raised by a signal handler, in the main thread.
            self._fail(_cut_short_error(self._world_rank, error))
            raise
        return None

    def _fail(self, error: Exception) -> Exception:
        """Remember the first failure, with which all later collectives end; return this one."""
        with self._lock:
            # The first failure is the cause; later ones follow from it.
            self._failure = self._failure or error
        return error

    def _completing(self, work: BackendWork, operation: Operation) -> Operation:
        """Run the operation of a message, and then complete its work."""
        try:
            yield from operation
        # The event loop closes the operations that it does not run to their end.
        except GeneratorExit:
            self._complete(work, self._destroyed_error())
            raise
        except Exception as error:
            self._complete(work, error)
            raise
        self._complete(work)

    def _expire_later(self, work: BackendWork) -> None:
        """Fail the future of a message when its time is over: no waiting thread may be there to count it."""
        self._pool.copy_num_threads()
        self._spawn(self._expiring(work, time.monotonic() + self._timeout_s))

    def _expiring(self, work: BackendWork, deadline_s: float) -> Operation:
        """Wait until a work is over or late, then fail its future if it is late. Also when the loop is closed."""
        try:
            # Not a sleep: a completed work ends it early, so that no operation outlives its message for long.
            yield _CompleteOrLate(work, deadline_s)
        finally:
            self._call_elsewhere(work.expire())

    def _complete(self, work: BackendWork, error: Exception | None = None) -> None:
        """End the work of a message, and let its future's callbacks run in a thread of the pool."""
        self._call_elsewhere(work.complete(error))

    def _call_elsewhere(self, set_future: Callable[[], None] | None) -> None:
        """Set a future in a thread of the pool: its callbacks may block, and this thread moves the messages."""
        if set_future is not None and not self._pool.submit(set_future):
            set_future()

    def _destroyed_error(self) -> RankLost:
        return RankLost(f"rank {self._world_rank}: this process group was destroyed with a message still under way.")


class _CompleteOrLate(Work):
    """Done when a work is over, or at a time. The event loop looks at it at least every `WATCH_SECONDS`."""

    def __init__(self, work: BackendWork, deadline_s: float) -> None:
        self._work, self._deadline_s = work, deadline_s

    def done(self) -> bool:
        return self._work.is_completed() or time.monotonic() > self._deadline_s

    def wait(self) -> None:
        assert self.done(), "only a spawned operation waits for a time"


def _cut_short_error(world_rank: int, error: BaseException) -> TuttiError:
    """The error of a group after a collective that a signal interrupted: peers are in the middle of it."""
    return TuttiError(
        f"rank {world_rank}: a collective was cut short here by {error!r}, and this process group is out of step with "
        "the others: destroy it, and make another."
    )
