"""A thread that takes the steps of many at once: whichever can go on goes on."""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from contextlib import AbstractContextManager, nullcontext, suppress

import torch

from tutti.errors import ConfigError, DeadlineExceeded, RankLost
from tutti.transports.base import Operation, Work
from tutti.transports.membership import WATCH_SECONDS

_AWAY_SECONDS = 0.001
"""What is asked for meanwhile, and not waited for, goes on so much later."""


class Mover(ABC):
    """Moves messages along, for a loop that does nothing else meanwhile."""

    guard: AbstractContextManager[object] = nullcontext()
    """Held by who takes steps or moves messages, where others than the loop may."""

    @abstractmethod
    def idle(self, seconds: float = WATCH_SECONDS) -> None:
        """Move what can be moved; return when something has, after so long, or when `wake` was called."""

    @abstractmethod
    def wake(self) -> None:
        """End an `idle`, from any thread."""

    @abstractmethod
    def over(self, work: Work) -> bool:
        """Whether `work` has come to an end. Moves nothing."""

    @abstractmethod
    def failure(self, work: Work) -> Exception | None:
        """Why work that is over came to nothing, if it did."""

    @abstractmethod
    def overdue(self, what: str) -> DeadlineExceeded:
        """The error for who has waited for `what` as long as a wait may last."""


class Driven(Work):
    """Work that whoever waits for it may move along."""

    @abstractmethod
    def drive(self, seconds: float) -> None:
        """Move it, and all else that is under way, until it is over or so long; or not, if somebody else does."""


class _SpawnedOperation(Driven):
    """Steps that the loop takes."""

    def __init__(self, steps: Operation, loop: "Loop", deadline: bool) -> None:
        self._steps, self._loop = steps, loop
        self._has_deadline = deadline
        self._moved_at = time.monotonic()
        self._waits_for: Work | None = None
        self._ended = threading.Event()
        self._error: Exception | None = None

    def advance(self, mover: Mover) -> bool:
        """Go on as far as possible; whether that was anywhere."""
        moved = False
        try:
            while (work := self._waits_for) is None or mover.over(work):
                moved = True
                self._moved_at = time.monotonic()
                failure = None if work is None else mover.failure(work)
                self._waits_for = next(self._steps) if failure is None else self._steps.throw(failure)
        except StopIteration:
            self._ended.set()
        except Exception as error:
            self.abort(error)
        return moved

    def fail(self, error: Exception) -> None:
        """As `abort`, but its steps hear why."""
        with suppress(BaseException):
            self._steps.throw(error)
        self.abort(error)

    def abort(self, error: Exception) -> None:
        self._steps.close()
        self._error = error
        self._ended.set()

    def drive(self, seconds: float) -> None:
        self._loop.drive(self, seconds)

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        started = time.monotonic()
        while not self._ended.wait(self._loop.patience_s):
            late = time.monotonic() - max(started, self._moved_at) > self._loop.patience_s
            if late and self._has_deadline:
                raise self._loop.mover.overdue("a reply")
        if self._error is not None:
            raise self._error


class Loop:
    """Takes steps beside each other, in one thread that is made when it is needed.

    A caller that waits may do so instead: nobody has to wake it then. While callers do so again and again, the thread
    keeps away.
    """

    def __init__(self, name: str, mover: Mover, patience_s: float) -> None:
        self.mover = mover
        self.patience_s = patience_s
        self._name = name
        self._new: deque[_SpawnedOperation] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._tasks: list[_SpawnedOperation] = []
        self._turn = threading.Lock()  # Held by who goes on with tasks.
        self._drivers = 0
        self._num_drives = 0
        self._closed = False
        self._failure: Exception | None = None

    def add(self, steps: Operation, deadline: bool) -> Work:
        """Have `steps` taken from now on; those who wait for them have a deadline if `deadline`."""
        task = _SpawnedOperation(steps, self, deadline)
        self._enqueue(task)
        self.mover.wake()
        return task

    def add_here(self, steps: Operation) -> Driven:
        """As `add` without a deadline, but the caller takes the steps that need not wait: the mover has a guard."""
        task = _SpawnedOperation(steps, self, deadline=False)
        with self.mover.guard, torch.no_grad():
            if not self._closed:
                task.advance(self.mover)
            if not task.done():
                self._enqueue(task)  # What it waits for will wake the loop.
        return task

    def _enqueue(self, task: _SpawnedOperation) -> None:
        with self._lock:
            if self._closed:
                raise self._failure or ConfigError(f"{self._name}: this transport is closed.")
            self._new.append(task)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"{self._name}, beside", daemon=True)
                self._thread.start()

    def interrupt(self) -> None:
        """Take no more steps. Idempotent."""
        with self._lock:
            self._closed = True
        if self._thread is not None:
            self.mover.wake()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self.interrupt()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def drive(self, task: _SpawnedOperation, seconds: float) -> None:
        """Take steps here until `task` is over, for so long at most; not if another caller does so already."""
        deadline_s = time.monotonic() + seconds
        with self._lock:
            if self._drivers:
                return
            self._drivers, self._num_drives = 1, self._num_drives + 1
        try:
            if not self._turn.acquire(blocking=False):
                self.mover.wake()  # The thread, which then lets go.
                self._turn.acquire()
            try:
                with torch.no_grad():
                    while not (task.done() or self._closed) and (left_s := deadline_s - time.monotonic()) > 0:
                        self._go_on(min(left_s, WATCH_SECONDS))
            except Exception as error:
                self._failure = self._failure or error
                self._closed = True  # The thread tells all of them.
            finally:
                self._turn.release()
        finally:
            self._drivers = 0

    def _run(self) -> None:
        try:
            with torch.no_grad():
                while not self._closed:
                    with self._turn:
                        while not (self._closed or self._drivers):
                            self._go_on()
                    self._keep_away()
        except BaseException as error:  # Of the one who moves messages: whoever waits for some must hear of it.
            stopped = RankLost(f"{self._name}: what moves messages here stopped: {error!r}.")
            self._failure = error if isinstance(error, Exception) else stopped
        with self._lock:
            self._closed = True
        with self._turn:
            for task in [*self._tasks, *self._new]:
                if self._failure is not None:
                    task.fail(self._failure)
                else:
                    task.abort(RankLost(f"{self._name}: this transport was closed with work still to do."))

    def _keep_away(self) -> None:
        """Until nobody has come to drive for a while."""
        seen = -1
        while not self._closed and (self._drivers or self._num_drives != seen):
            seen = self._num_drives
            time.sleep(_AWAY_SECONDS)

    def _go_on(self, seconds: float = WATCH_SECONDS) -> None:
        while self._new:
            self._tasks.append(self._new.popleft())
        with self.mover.guard:
            moved = [task.advance(self.mover) for task in self._tasks]
        self._tasks[:] = [task for task in self._tasks if not task.done()]
        if not any(moved) and not self._new and not self._closed:
            self.mover.idle(seconds)
