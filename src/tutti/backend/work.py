"""The work objects that a Tutti process group returns: torch's `dist.Work`, with a future on demand.

How it works
------------
A `BackendWork` is completed once, by `complete`, from any thread; a second call does nothing. The lock makes the two
races safe that are possible: `complete` against `get_future` (exactly one of them sets the future), and `complete`
against `expire` (a future that has failed with a timeout is not set again).

A thread that waits acquires `_gate`, which is held from the start and released by `complete`; it passes it on to the
next. A lock is woken faster than a `threading.Event`.

Futures are read by Python, and by torch's own C++: DDP takes their value as tensors. `Future.set_exception` stores the
exception as a value, which only Python knows how to raise; C++ reads it as tensors and crashes. So a future that users
get is made by `then` from one that says that the work is over: where that callback raises, C++ knows that the future
has failed. Python's `wait` then raises a RuntimeError with the text of the error, as Gloo does.

Setting a future runs the callbacks of its users, which may start other operations and wait for them. So `complete` does
not set it, but returns a function that does. Its caller decides in which thread that is safe.

Three ways to complete a work:

- Collectives: the thread of the operation queue, or the caller, completes it.
- Messages: the waiting caller may drive the transport's event loop itself (`drive`), which saves two thread switches.
- Virtual time: no other thread runs meanwhile, so the waiting caller completes it (`poll_with`, `finish`).
"""

import threading
import time
from collections.abc import Callable
from copy import copy
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from tutti.errors import DeadlineExceeded

_NO_TIMEOUT = timedelta(0)


class BackendWork(dist.Work):
    """A collective or a message of a process group that is in progress."""

    def __init__(self, world_rank: int, outputs: list[Tensor]) -> None:
        """Make work of `world_rank` (for error messages) that writes `outputs`."""
        super().__init__()
        self._world_rank, self._outputs = world_rank, outputs
        self._over = False
        self._gate = threading.Lock()  # Held until the work is over.
        self._gate.acquire(blocking=False)
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._future: _WorkFuture | None = None
        self._expired = False  # Whether the future was already set to a timeout.
        self.source = -1
        """The rank from which a received message came."""
        self.timeout_s = -1.0
        """How long `wait` waits if it is given no timeout; negative: without limit, as the operation has deadlines."""
        self.drive: Callable[[float], None] | None = None
        """Lets the waiting thread move the messages itself, for so many seconds at most."""
        self.on_future: Callable[[BackendWork], None] | None = None
        """Called when a future is taken before the work is over."""
        self._done: Callable[[], bool] | None = None
        self._finish: Callable[[], None] | None = None

    def poll_with(self, done: Callable[[], bool], finish: Callable[[], None]) -> None:
        """Let the waiting thread complete this work: `done` says whether `finish`, which does, would return at once."""
        self._done, self._finish = done, finish

    def finish(self) -> None:
        """Complete this work, if that is the task of the waiting thread."""
        if not self._over and self._finish is not None:
            self._finish()

    def complete(self, error: Exception | None = None) -> Callable[[], None] | None:
        """Mark this work as over, with `error` if it failed. Only the first call counts. From any thread.

        Returns a function that sets the future, if one was taken. It runs the callbacks of the future's users.
        """
        with self._lock:
            if self._over:
                return None
            # Error before flag: readers of `_over` do not take the lock.
            self._error, self._over = error, True
            # Lets one waiting thread pass, which lets the next one pass in turn (`_pass_gate`).
            self._gate.release()
            if self._future is None or self._expired:  # A future that is taken from now on is set by `get_future`.
                return None
            return partial(self._future.set, self._outputs if error is None else error)

    def expire(self) -> Callable[[], None] | None:
        """Fail the future with a timeout; the work itself continues. Returns what `complete` returns."""
        with self._lock:
            if self._over or self._future is None:
                return None
            self._expired = True
            return partial(self._future.set, self._timeout_error(self.timeout_s))

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return when the work is over.

        Raises its error, or `DeadlineExceeded` after `timeout`; without one, after `timeout_s`.
        """
        # Virtual time: here nobody else completes the work.
        self.finish()
        seconds = timeout.total_seconds() if timeout > _NO_TIMEOUT else self.timeout_s
        left_s = seconds
        # This thread moves the messages itself, which saves two thread switches per message.
        if not self._over and self.drive is not None:
            started_s = time.monotonic()
            self.drive(seconds)
            # Another thread may drive already: then the rest of the time is spent at the gate.
            left_s = max(0.0, started_s + seconds - time.monotonic())
        if not self._over and not self._pass_gate(left_s):
            raise self._timeout_error(seconds)
        if self._error is not None:
            raise self._error
        return True

    def _pass_gate(self, seconds: float) -> bool:
        """Wait until the work is over, without limit if `seconds` is negative; return whether it is."""
        if not self._gate.acquire(timeout=seconds):
            return False
        self._gate.release()  # For the next thread that waits.
        return True

    def is_completed(self) -> bool:
        if self._done is not None and not self._over and self._done():
            self.finish()
        return self._over

    def is_success(self) -> bool:
        return self._over and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank

    def get_future(self) -> Future[list[Tensor]]:
        """A future of the tensors that this work writes."""
        with self._lock:
            future, over = self._future, self._over
            new = future is None
            if future is None:
                future = self._future = _WorkFuture()
        # Exactly one of `complete` and this method sets the future: both look at `_over` and `_future` under the lock.
        # Outside the lock: setting a future runs callbacks, which may use this work.
        if new and over:
            future.set(self._outputs if self._error is None else self._error)
        elif new and self.on_future is not None:
            self.on_future(self)
        return future.given

    def _timeout_error(self, seconds: float) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"rank {self._world_rank}: waited {seconds:g} s for an operation of torch.distributed. It goes on: wait "
            "again, or give more: the timeout of wait, init_process_group or new_group."
        )


class _WorkFuture:
    """The future of a work that users get, and what sets it. Neither refers to the work: torch hides cycles."""

    def __init__(self) -> None:
        self._over: Future[None] = Future()
        self._outcome: list[list[Tensor] | Exception] = []
        outcome = self._outcome

        def value(_: Future[None]) -> list[Tensor]:
            if isinstance(outcome[0], Exception):
                # A copy: a traceback holds frames, and those may hold the future.
                raise copy(outcome[0])
            return outcome[0]

        self.given: Future[list[Tensor]] = self._over.then(value)
        """Has the tensors, or has failed, once `set` was called."""

    def set(self, outcome: list[Tensor] | Exception) -> None:
        """Give it its value, or let it fail. Called once. Runs the callbacks of its users."""
        self._outcome.append(outcome)
        self._over.set_result(None)


class CoalescedWork(dist.Work):
    """Several works as one, as torch's coalescing manager returns them."""

    def __init__(self, works: list[BackendWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        # Stops at the first work that fails; the others go on by themselves.
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)
