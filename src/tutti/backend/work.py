"""What a group hands back for something under way."""

import threading
import time
from collections.abc import Callable
from copy import copy
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from tutti.errors import DeadlineExceeded

_NONE = timedelta(0)


class BackendWork(dist.Work):
    """Something a group was asked to do. Whoever does it says when it is over."""

    def __init__(self, rank: int, outputs: list[Tensor]) -> None:
        super().__init__()
        self._rank, self._outputs = rank, outputs
        self._over = False
        self._gate = threading.Lock()  # Whoever waits comes through it when this is over: quicker than an Event.
        self._gate.acquire()
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._future: Future[list[Tensor]] | None = None
        self._expired = False  # Whether that was told to wait no longer.
        self.source = -1
        """Of a message that was received."""
        self.patience_s = -1.0
        """How long to wait where no deadline is given; negative: for ever, as whoever does it has one."""
        self.drive: Callable[[float], None] | None = None
        """Lets who waits do, for so many seconds at most, what somebody else would do otherwise."""
        self.expected: Callable[[BackendWork], None] | None = None
        """Called when somebody takes a future before it is over."""
        self._done: Callable[[], bool] | None = None
        self._finish: Callable[[], None] | None = None

    def follow(self, done: Callable[[], bool], finish: Callable[[], None]) -> None:
        """Say how to see whether it can be ended, and how to end it, where nobody else does: in virtual time."""
        self._done, self._finish = done, finish

    def finish(self) -> None:
        """See to it that it is over, if that is for whoever waits to do."""
        if not self._over and self._finish is not None:
            self._finish()

    def conclude(self, error: Exception | None = None) -> Callable[[], None] | None:
        """It is over, for the first time it is said. From any thread.

        Returns what is left to do, if anything: to tell who took a future. That calls whatever they want called.
        """
        with self._lock:
            if self._over:
                return None
            self._error, self._over = error, True
            self._gate.release()
            if self._future is None or self._expired:  # One that is taken from now on is told there.
                return None
            return partial(self._tell, self._future)

    def expire(self) -> Callable[[], None] | None:
        """Whoever took a future has waited for long enough. As `conclude`; but the operation itself goes on."""
        with self._lock:
            if self._over or self._future is None:
                return None
            self._expired = True
            return partial(_fail, self._future, self._overdue(self.patience_s))

    def wait(self, timeout: timedelta = _NONE) -> bool:
        """Return when it is over; raise what went wrong, or `DeadlineExceeded` after `timeout`, or the group's own."""
        self.finish()
        seconds = timeout.total_seconds() if timeout > _NONE else self.patience_s
        left_s = seconds
        if not self._over and self.drive is not None:
            started_s = time.monotonic()
            self.drive(seconds)
            left_s = max(0.0, started_s + seconds - time.monotonic())
        if not self._over and not self._pass(left_s):
            raise self._overdue(seconds)
        if self._error is not None:
            raise self._error
        return True

    def _pass(self, seconds: float) -> bool:
        """Wait until it is over, for ever if `seconds` are negative; whether it is."""
        if not self._gate.acquire(timeout=seconds):
            return False
        self._gate.release()  # For the next.
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
        """A future of the tensors that this fills."""
        with self._lock:
            future, over = self._future, self._over
            if future is None:
                future = self._future = Future()
                new = True
            else:
                new = False
        if new and over:
            self._tell(future)
        elif new and self.expected is not None:
            self.expected(self)
        return future

    def _overdue(self, seconds: float) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"rank {self._rank}: waited {seconds:g} s for an operation of torch.distributed. It goes on: wait "
            "again, or give more: the timeout of wait, init_process_group or new_group."
        )

    def _tell(self, future: Future[list[Tensor]]) -> None:
        if self._error is None:
            future.set_result(self._outputs)
        else:
            _fail(future, self._error)


def _fail(future: Any, error: Exception) -> None:
    """Have those who wait for `future` raise a copy of `error` each.

    A traceback has frames, which may well have the future, and torch keeps an error where no cycle is ever found.
    """

    def fail(kept: Exception) -> None:
        raise copy(kept)

    future._set_unwrap_func(fail)
    future.set_result(copy(error))


class CoalescedWork(dist.Work):
    """Several operations as one."""

    def __init__(self, operations: list[BackendWork]) -> None:
        super().__init__()
        self._operations = operations

    def wait(self, timeout: timedelta = _NONE) -> bool:
        return all(operation.wait(timeout) for operation in self._operations)

    def is_completed(self) -> bool:
        return all(operation.is_completed() for operation in self._operations)
