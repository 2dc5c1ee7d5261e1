"""An event loop that runs many spawned operations concurrently in one thread.

How it works
------------
`EventLoop` holds operations and resumes each as soon as the work it yielded is over. It knows nothing about sockets or
MPI: a `ProgressEngine` moves the messages and says which work is over.

One pass (`_advance_all`): take over new operations, resume all that can continue, drop those that ended; if none
continued, let the engine wait for messages. Whoever makes a pass holds `_turn`. There are three possible runners:

- The loop's own daemon thread, created with the first operation. It makes passes until the loop is closed.
- A caller that waits for one operation (`drive`). It makes the passes itself until that operation is over, which saves
  two thread switches per message. At most one caller drives. It sets `_num_drivers`, wakes the thread, which then
  releases `_turn`, and takes `_turn`. The thread then stays away until no caller has driven for a while
  (`_stay_away`): in a sequence of blocking calls, each of them would otherwise fight it for the turn.
- A caller of `spawn_inline` runs only the first part of its new operation, under `engine.guard`, without the turn.
  The guard excludes passes and message handlers, not the engine's wait. If the operation has to wait, its sockets are
  already registered with the selector, so their events end that wait, and no thread has to be woken.

Who may write what: `_new` is appended under `_lock`, and emptied by the holder of `_turn`. `_operations` belongs to the
holder of `_turn`. An operation is resumed only under `engine.guard`, by one thread at a time.

Waits: `_SpawnedOperation.wait` ends when the operation is over. Every progress restarts its deadline; without progress
it fails after `timeout_s`, unless the operation was spawned without a deadline. A lost peer makes the engine report its
work as over with an error, which is thrown into the operation. If the engine itself fails, or the loop is closed, the
thread ends every operation with an error before it exits.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from contextlib import AbstractContextManager, nullcontext, suppress

import torch

from tutti.coordination.activity import Wait
from tutti.errors import ConfigError, DeadlineExceeded, RankLost
from tutti.transports.base import Operation, Work
from tutti.transports.membership import WATCH_SECONDS

_STAY_AWAY_SECONDS = 0.001
"""How long the loop's thread leaves the turn to callers that drive. Other operations are delayed as much."""

_UNREPORTED_SECONDS = 0.1
"""A wait that lasts longer is reported to the coordinator."""


class ProgressEngine(ABC):
    """Moves the messages of one transport for an event loop, and says which work is over."""

    guard: AbstractContextManager[object] = nullcontext()
    """Held while operations are resumed and messages are handled, where `EventLoop.add_inline` is used."""

    @abstractmethod
    def idle(self, seconds: float = WATCH_SECONDS) -> None:
        """Wait until a message made progress, at most `seconds`, or until `wake` is called."""

    @abstractmethod
    def wake(self) -> None:
        """End a running `idle`, from any thread."""

    @abstractmethod
    def over(self, work: Work) -> bool:
        """Whether `work` is complete or has failed. Moves nothing."""

    @abstractmethod
    def failure(self, work: Work) -> Exception | None:
        """The error of work that is over, or None if it succeeded."""

    @abstractmethod
    def waiting(self, work: Work | None) -> AbstractContextManager[Wait]:
        """Report to others that this thread waits for `work`, of which None is known."""

    @abstractmethod
    def check(self, work: Work | None, wait: Wait) -> None:
        """Raise if this rank can take no more part: its waits end. Restart `wait` if data of `work` has moved."""

    @abstractmethod
    def timeout_error(self, awaited: str) -> DeadlineExceeded:
        """The error for a caller that has waited for `awaited` longer than the transport's timeout."""


class DrivableWork(Work):
    """Work that the waiting caller can make progress on, instead of waiting for another thread."""

    @abstractmethod
    def drive(self, seconds: float) -> None:
        """Make progress on this and all other work until this is over, for at most `seconds`.

        Returns at once if another caller drives already.
        """


class _SpawnedOperation(DrivableWork):
    """An operation that the loop runs."""

    def __init__(self, operation: Operation, loop: "EventLoop", deadline: bool) -> None:
        self._operation, self._loop = operation, loop
        self._has_deadline = deadline
        self._progressed_at = time.monotonic()
        self._waits_for: Work | None = None
        # Set last, by the thread that ends the operation: `_error` is written before it, so a waiting thread sees both.
        self._ended = threading.Event()
        self._error: Exception | None = None

    def advance(self, engine: ProgressEngine) -> bool:
        """Resume the operation until it has to wait; return whether it was resumed at all. Under `engine.guard`."""
        progressed = False
        try:
            # None: the operation has not been begun yet.
            while (work := self._waits_for) is None or engine.over(work):
                progressed = True
                self._progressed_at = time.monotonic()
                failure = None if work is None else engine.failure(work)
                # The error is thrown in at the `yield`, where the operation may catch it and go on.
                self._waits_for = next(self._operation) if failure is None else self._operation.throw(failure)
        except StopIteration:
            self._ended.set()
        except Exception as error:
            # Only this operation ends. The others, and the loop, go on.
            self.abort(error)
        return progressed

    def fail(self, error: Exception) -> None:
        """End the operation with `error`, which is also raised inside it."""
        # It may raise the same error, raise another one, or catch it and yield again: it ends here in any case.
        with suppress(BaseException):
            self._operation.throw(error)
        self.abort(error)

    def abort(self, error: Exception) -> None:
        """End the operation with `error`, without raising it inside."""
        self._operation.close()
        self._error = error
        self._ended.set()

    def drive(self, seconds: float) -> None:
        self._loop.drive(self, seconds)

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        if not self._ended.wait(min(_UNREPORTED_SECONDS, self._loop.timeout_s)):
            self._wait_long()
        if self._error is not None:
            raise self._error

    def _wait_long(self) -> None:
        """Wait, and report it. Ended by the operation, by the loss of a rank, or by the deadline if there is one."""
        engine, limit_s, started = self._loop.engine, self._loop.timeout_s, time.monotonic()
        over = False
        while not over:
            awaited = self._waits_for
            # Anew whenever the operation waits for something else.
            with engine.waiting(awaited) as wait:
                while self._waits_for is awaited and not over:
                    engine.check(awaited, wait)
                    # Progress after the wait began restarts the deadline, so a late check is not yet a timeout.
                    late = time.monotonic() - max(started, self._progressed_at) > limit_s
                    if late and self._has_deadline:
                        raise engine.timeout_error("a reply")
                    over = self._ended.wait(min(WATCH_SECONDS, limit_s))


class EventLoop:
    """Runs operations concurrently, in one thread that is created when it is needed, or in a caller that waits."""

    def __init__(self, name: str, engine: ProgressEngine, timeout_s: float) -> None:
        """Prepare a loop over `engine`; `name` starts error messages, `timeout_s` limits waits without progress."""
        self.engine = engine
        self.timeout_s = timeout_s
        self._name = name
        self._new: deque[_SpawnedOperation] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._operations: list[_SpawnedOperation] = []
        self._turn = threading.Lock()  # Held by the thread that makes passes.
        self._num_drivers = 0  # 0 or 1.
        self._num_drives = 0  # Counts calls of `drive`, so that the thread sees whether there were new ones.
        self._closed = False
        self._failure: Exception | None = None

    def add(self, operation: Operation, deadline: bool) -> Work:
        """Run `operation` from now on. With `deadline`, waits for it fail after `timeout_s` without progress."""
        spawned = _SpawnedOperation(operation, self, deadline)
        self._enqueue(spawned)
        self.engine.wake()
        return spawned

    def add_inline(self, operation: Operation) -> DrivableWork:
        """As `add` without a deadline, but the caller runs the first part. The engine must have a real guard."""
        spawned = _SpawnedOperation(operation, self, deadline=False)
        # The caller may be in inference mode, whose tensors the loop's thread could not write to.
        with self.engine.guard, torch.inference_mode(False), torch.no_grad():
            if not self._closed:
                spawned.advance(self.engine)
            if not spawned.done():
                self._enqueue(spawned)  # No wake-up: the message it waits for ends the engine's wait.
        return spawned

    def _enqueue(self, spawned: _SpawnedOperation) -> None:
        """Hand an operation to the holder of the turn, and start the loop's thread with the first one."""
        with self._lock:
            if self._closed:
                raise self._failure or ConfigError(f"{self._name}: this transport is closed.")
            # Under the lock together with the check of `_closed`: `_run` ends all operations once it has set that flag.
            self._new.append(spawned)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"{self._name}, event loop", daemon=True)
                self._thread.start()

    def interrupt(self) -> None:
        """Resume no operation from now on; the thread ends them with an error. Idempotent."""
        with self._lock:
            self._closed = True
        if self._thread is not None:
            self.engine.wake()

    def close(self) -> None:
        """Join the thread. Idempotent."""
        self.interrupt()
        if self._thread is not None and self._thread is not threading.current_thread():
            # Ended by `interrupt`: the thread leaves its passes at the next look at `_closed`, or when the engine's
            # wait is woken.
            self._thread.join()

    def drive(self, spawned: _SpawnedOperation, seconds: float) -> None:
        """Make passes in the calling thread until `spawned` is over, for at most `seconds`.

        Returns at once if another caller drives already.
        """
        deadline_s = time.monotonic() + seconds
        with self._lock:
            # One driver moves the messages of all callers; a second would only wait for the turn.
            if self._num_drivers:
                return
            self._num_drivers, self._num_drives = 1, self._num_drives + 1
        # From here on the loop's thread gives the turn up when it sees the driver, and does not take it again.
        try:
            # It is free while the loop's thread stays away, and then no thread has to be switched.
            if not self._turn.acquire(blocking=False):
                self.engine.wake()  # The loop's thread, which sees the driver and releases the turn.
                # Ended by the loop's thread, which gives the turn up after its present pass at the latest.
                self._turn.acquire()
            try:
                with torch.inference_mode(False), torch.no_grad():
                    while not (spawned.done() or self._closed) and (left_s := deadline_s - time.monotonic()) > 0:
                        self._advance_all(min(left_s, WATCH_SECONDS))
            except Exception as error:
                # The engine failed in this thread. The loop's own thread, which owns the end of all operations, is left
                # to do it.
                self._failure = self._failure or error
                self._closed = True  # The thread ends all operations with this error.
            finally:
                self._turn.release()
        finally:
            # Without the lock: only the one driver writes it here, and new drivers are refused until it does.
            self._num_drivers = 0

    def _run(self) -> None:
        """Make passes until the loop is closed; then end every operation that is left. The loop's own thread."""
        try:
            with torch.no_grad():
                while not self._closed:
                    with self._turn:
                        while not (self._closed or self._num_drivers):
                            self._advance_all()
                    self._stay_away()
        except BaseException as error:  # The engine failed: every caller that waits must get an error.
            stopped = RankLost(f"{self._name}: the thread that moves messages here stopped with {error!r}.")
            self._failure = error if isinstance(error, Exception) else stopped
        # Under the lock: no operation can be added after the ones that are ended below.
        with self._lock:
            self._closed = True
        # A driver may still hold the turn; it leaves because the loop is closed.
        with self._turn:
            for spawned in [*self._operations, *self._new]:
                if self._failure is not None:
                    spawned.fail(self._failure)
                else:
                    spawned.abort(RankLost(f"{self._name}: this transport was closed with work still to do."))

    def _stay_away(self) -> None:
        """Sleep until no caller has driven the loop for `_STAY_AWAY_SECONDS`."""
        seen = -1
        # Polled rather than signalled: a signal at the end of each drive would cost the driver a system call.
        while not self._closed and (self._num_drivers or self._num_drives != seen):
            seen = self._num_drives
            time.sleep(_STAY_AWAY_SECONDS)

    def _advance_all(self, seconds: float = WATCH_SECONDS) -> None:
        """Make one pass over all operations; if none continued, wait for messages for at most `seconds`."""
        # By `popleft`, not by iteration: other threads append meanwhile.
        while self._new:
            self._operations.append(self._new.popleft())
        with self.engine.guard:
            # A list, not `any`, which would stop at the first: every operation gets its chance in every pass.
            progressed = [spawned.advance(self.engine) for spawned in self._operations]
        self._operations[:] = [spawned for spawned in self._operations if not spawned.done()]
        # An operation that continued may have set a signal or freed a message for another: look at all of them again.
        if not any(progressed) and not self._new and not self._closed:
            self.engine.idle(seconds)
