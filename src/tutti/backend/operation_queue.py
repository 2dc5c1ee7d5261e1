"""Who takes the steps of a group's operations: collectives one after the other, messages beside each other."""

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
    """Takes steps, and tells their operation when they are over."""

    @abstractmethod
    def collective(self, operation: BackendWork, steps: Operation, here: bool) -> None:
        """Take `steps` after those of the collectives before; `here`: the caller waits anyway."""

    @abstractmethod
    def message(self, operation: BackendWork, steps: Operation) -> None:
        """Take `steps` of a message beside everything else."""

    @abstractmethod
    def close(self) -> None:
        """Take no more; what is under way fails. The transport has been interrupted before. Idempotent."""


class RealTimeQueue(OperationQueue):
    """Collectives that the caller waits for are done by the caller, others by a thread that is made when it is needed.

    Messages are moved by who waits for one, or by the thread of their own transport. None of these calls what somebody
    wants called then while there is more for it to do: that may ask for more, and wait for it.
    """

    def __init__(self, messages: Transport, me: int) -> None:
        self._send = (
            messages.spawn_inline if isinstance(messages, SpawnsInline) else partial(messages.spawn, deadline=False)
        )
        self._me, self._patience_s = me, messages.timeout.total_seconds()
        self._hands = ThreadPool(f"rank {me}, collectives")
        self._lock = threading.Lock()
        self._queue: deque[tuple[BackendWork, Operation]] = deque()
        self._busy = False  # Whether somebody takes steps of collectives, or is about to.
        self._failure: Exception | None = None
        self._underway: WeakSet[BackendWork] = WeakSet()  # Of messages.

    def collective(self, operation: BackendWork, steps: Operation, here: bool) -> None:
        with self._lock:
            failure, free = self._failure, not self._busy
            if failure is None:
                self._busy = True
                if not (here and free):
                    self._queue.append((operation, steps))
        if failure is not None:
            operation.conclude(failure)
        elif here and free:
            self._take_here(operation, steps)
        elif free:
            self._have_taken()

    def message(self, operation: BackendWork, steps: Operation) -> None:
        operation.patience_s, operation.expected = self._patience_s, self._limit  # Its steps have no deadline.
        work = self._send(self._told(operation, steps))
        if isinstance(work, DrivableWork):
            operation.drive = work.drive
        self._underway.add(operation)

    def close(self) -> None:
        with self._lock:
            self._failure = ConfigError(f"rank {self._me}: this process group was destroyed.")
        self._hands.close()
        for operation in list(self._underway):  # Steps that were never begun tell nobody.
            self._over(operation, self._closed())

    def _take_here(self, operation: BackendWork, steps: Operation) -> None:
        try:
            error = self._take(steps)
        finally:
            if self._more():
                self._have_taken()
        operation.conclude(error)  # Nobody else knows of it yet.

    def _take_all(self) -> None:
        """Take the steps of what is queued, in order."""
        while self._more():
            operation, steps = self._queue.popleft()
            try:
                error = self._take(steps)
            except BaseException as failure:  # It ends here: this is nobody's main thread.
                error = self._failure or _cut_short(self._me, failure)
            tell = operation.conclude(error)
            del operation, steps  # They hold tensors.
            if tell is not None:
                handed_on = not self._more() or self._hands.do(self._take_all)
                tell()
                if handed_on:
                    return

    def _have_taken(self) -> None:
        """Have what is queued taken by somebody else, if there is anybody."""
        self._hands.compute_as_here()
        if not self._hands.do(self._take_all):
            self._take_all()

    def _more(self) -> bool:
        """Whether more is queued, for who takes steps; if not, it does so no longer."""
        with self._lock:
            self._busy = bool(self._queue)
            return self._busy

    def _take(self, steps: Operation) -> Exception | None:
        """Take all of them, unless something before them failed; what went wrong."""
        if self._failure is not None:  # Of what came before: this would be out of step.
            return self._failure
        try:
            with torch.no_grad():
                run_operation(steps)
        except Exception as error:
            return self._fail(error)
        except BaseException as error:  # A signal's, in the main thread.
            self._fail(_cut_short(self._me, error))
            raise
        return None

    def _fail(self, error: Exception) -> Exception:
        with self._lock:
            self._failure = self._failure or error
        return error

    def _told(self, operation: BackendWork, steps: Operation) -> Operation:
        """The same steps of a message, and then their operation is over."""
        try:
            yield from steps
        except GeneratorExit:
            self._over(operation, self._closed())
            raise
        except Exception as error:
            self._over(operation, error)
            raise
        self._over(operation)

    def _limit(self, operation: BackendWork) -> None:
        """Somebody took a future of a message, and may wait for it, where nobody counts the time."""
        self._hands.compute_as_here()
        self._send(self._given_up(operation, time.monotonic() + self._patience_s))

    def _given_up(self, operation: BackendWork, deadline_s: float) -> Operation:
        try:
            yield _Until(operation, deadline_s)
        finally:
            self._tell(operation.expire())

    def _over(self, operation: BackendWork, error: Exception | None = None) -> None:
        self._tell(operation.conclude(error))

    def _tell(self, tell: Callable[[], None] | None) -> None:
        if tell is not None and not self._hands.do(tell):
            tell()

    def _closed(self) -> RankLost:
        return RankLost(f"rank {self._me}: this process group was destroyed with a message still under way.")


class _Until(Work):
    """Done when an operation is over, or at a time, as long as somebody looks now and then."""

    def __init__(self, operation: BackendWork, deadline_s: float) -> None:
        self._operation, self._deadline_s = operation, deadline_s

    def done(self) -> bool:
        return self._operation.is_completed() or time.monotonic() > self._deadline_s

    def wait(self) -> None:
        assert self.done(), "only steps beside others wait for a time"


def _cut_short(me: int, error: BaseException) -> TuttiError:
    return TuttiError(
        f"rank {me}: a collective was cut short here by {error!r}, and this process group is out of step with the "
        "others: destroy it, and make another."
    )
