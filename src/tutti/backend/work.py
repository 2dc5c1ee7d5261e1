"""What a group hands back for something under way."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from tutti.errors import DeadlineExceeded

_NONE = timedelta(0)


class Operation(dist.Work):
    """Something a group was asked to do. Whoever does it says when it is over."""

    def __init__(self, rank: int, outputs: list[Tensor]) -> None:
        super().__init__()
        self._rank, self._outputs = rank, outputs
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._future: Future[list[Tensor]] | None = None
        self.source = -1
        """Of a message that was received."""
        self.finish: Callable[[], None] | None = None
        """Sees to it that it is over: where nobody else does, as in virtual time."""
        self.expected: Callable[[Operation], None] | None = None
        """Called when somebody takes a future, on which nobody can wait in virtual time."""

    def conclude(self, error: Exception | None = None) -> None:
        """It is over, for the first time it is said. From any thread."""
        with self._lock:
            if self._over.is_set():
                return
            self._error = error
            self._over.set()
        if self._future is not None:
            self._tell(self._future)

    def wait(self, timeout: timedelta = _NONE) -> bool:
        """Return when it is over; raise what went wrong, or `DeadlineExceeded` after `timeout`, if one is given."""
        if not self._over.is_set() and self.finish is not None:
            self.finish()
        seconds = timeout.total_seconds()
        if not self._over.wait(seconds if seconds > 0 else None):
            raise DeadlineExceeded(
                f"rank {self._rank}: waited {seconds:g} s for an operation of torch.distributed. It goes on: wait "
                "again, or give it longer."
            )
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._over.is_set()

    def is_success(self) -> bool:
        return self._over.is_set() and self._error is None

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
            future, over = self._future, self._over.is_set()
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

    def _tell(self, future: Any) -> None:
        if self._error is None:
            future.set_result(self._outputs)
        else:
            future.set_exception(self._error)


class Together(dist.Work):
    """Several operations as one."""

    def __init__(self, operations: list[Operation]) -> None:
        super().__init__()
        self._operations = operations

    def wait(self, timeout: timedelta = _NONE) -> bool:
        return all(operation.wait(timeout) for operation in self._operations)

    def is_completed(self) -> bool:
        return all(operation.is_completed() for operation in self._operations)
