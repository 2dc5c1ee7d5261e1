"""Work under way in virtual time."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

from tutti.transports.base import CompletedWork, Operation, Signal, Work

if TYPE_CHECKING:
    from tutti.simulation.engine import Action
    from tutti.simulation.rank import Rank


class Pending(Work):
    """Work of a simulated rank. When it will be over is known from some moment on, which may be earlier."""

    __slots__ = ("error", "finish_s", "rank", "wake")

    def __init__(self, rank: "Rank") -> None:
        self.rank = rank
        self.finish_s: float | None = None
        self.error: Exception | None = None
        self.wake: Action | None = None  # Who waits.

    def done(self) -> bool:
        return self.rank.knows(self)

    def wait(self) -> None:
        self.rank.wait(self)

    def complete(self, time_s: float) -> None:
        """Say when it is over: now or later."""
        self.finish_s = time_s
        if self.wake is not None:
            self.rank.engine.at(time_s, self.wake)
            self.wake = None  # It may be completed again, after a deadline: nobody waits then.

    def fail(self, error: Exception) -> None:
        """It is over now, and has come to nothing."""
        if self.finish_s is None:
            self.error = error
            self.complete(self.rank.engine.now)

    def overdue(self, error: Exception) -> None:
        """Nobody waits for it any longer."""
        self.fail(error)

    @property
    def under_way_s(self) -> float:
        """Until when it is known to go on, so that a deadline has to wait."""
        return 0.0

    def describe(self) -> str:
        """What a rank that waits for it waits for."""
        raise NotImplementedError


class SimulatedOperation(Pending):
    """Steps that are taken while their rank computes: whenever what they wait for is over."""

    def __init__(self, rank: "Rank", steps: Operation, queue: "OperationSequence", deadline: bool = True) -> None:
        super().__init__(rank)
        self._has_deadline = deadline
        self._steps = steps
        self._queue = queue
        self._waits_for: Pending | None = None
        self._stepped_s = self.posted_s = rank.time

    def go(self) -> None:
        """Take steps until one has to wait."""
        rank, steps = self.rank, self._steps
        if rank.gone is not None or self.finish_s is not None:  # It may have been given up since this was due.
            return
        self._stepped_s = rank.engine.now
        rank.stepping = True
        try:
            failure = None if self._waits_for is None else self._waits_for.error
            following: Iterator[Any]
            while True:
                following = steps if failure is None else chain((steps.throw(failure),), steps)
                if (failure := self._follow(following)) is None:
                    break
        except StopIteration:
            self._end(None)
        except Exception as error:
            self._end(error)
        finally:
            rank.stepping = False

    def _follow(self, steps: Iterator[Any]) -> Exception | None:
        """Take steps until one has to wait, or one has failed; raises `StopIteration` at the end."""
        rank = self.rank
        now = rank.engine.now
        for work in steps:
            if work.__class__ is CompletedWork:
                continue
            self._waits_for = work
            finish_s = work.finish_s
            if finish_s is None:
                work.wake = self.go
                return None
            if finish_s > now:
                rank.engine.at(finish_s, self.go)
                return None
            if work.error is not None:
                return work.error
        raise StopIteration

    def _end(self, error: Exception | None) -> None:
        self._steps.close()
        if error is None:
            self.complete(self.rank.engine.now)
        else:
            self.fail(error)
        self._queue.next(self, error)

    def give_up(self, error: Exception) -> None:
        with suppress(ValueError):  # It may be these very steps that have come to this.
            self._steps.close()
        self.fail(error)

    def overdue(self, error: Exception) -> None:
        self._queue.overdue(self, error)

    @property
    def under_way_s(self) -> float:
        if not self._has_deadline:
            return self.rank.engine.now
        first = self._queue.first or self  # Those before it go on for it, too.
        waits = first._waits_for
        return max(first._stepped_s, waits.under_way_s if isinstance(waits, Pending) else 0.0)

    def describe(self) -> str:
        waits = self._waits_for
        if self.finish_s is None and isinstance(waits, Pending) and waits.finish_s is None:
            return f"steps under way, which wait for {waits.describe()}"
        return "steps under way"


class SimulatedSignal(Pending, Signal):
    """Done from the moment at which somebody says so."""

    def set(self) -> None:
        self.complete(self.rank.engine.now)

    def describe(self) -> str:
        return "its own steps"


class OperationSequence:
    """Steps started on one transport, taken one after the other."""

    def __init__(self) -> None:
        self._queue: list[SimulatedOperation] = []
        self._failure: Exception | None = None

    def start(self, rank: "Rank", steps: Operation, deadline: bool = True) -> SimulatedOperation:
        """Have steps taken."""
        operation = SimulatedOperation(rank, steps, self, deadline)
        if self._failure is not None:
            operation.give_up(self._failure)
        else:
            self._add(operation)
        return operation

    def _add(self, operation: SimulatedOperation) -> None:
        self._queue.append(operation)
        if len(self._queue) == 1:
            operation.rank.engine.at(operation.posted_s, operation.go)

    @property
    def first(self) -> SimulatedOperation | None:
        return self._queue[0] if self._queue else None

    def next(self, operation: SimulatedOperation, error: Exception | None) -> None:
        """The first is over. After a failure the others would be out of step: they fail too."""
        del self._queue[0]
        if error is not None:
            self.fail(error)
        elif self._queue:
            following = self._queue[0]
            following.rank.engine.at(max(following.rank.engine.now, following.posted_s), following.go)

    def overdue(self, operation: SimulatedOperation, error: Exception) -> None:
        """Somebody has waited for too long: those behind it would be out of step."""
        self.fail(error)

    def fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        queue, self._queue = self._queue, []
        for operation in queue:
            operation.give_up(error)


class ConcurrentOperations(OperationSequence):
    """Steps started on one transport, taken beside each other."""

    def __init__(self) -> None:
        super().__init__()
        self._under_way: dict[
            SimulatedOperation, None
        ] = {}  # In the order in which they were started; there may be thousands.

    def _add(self, operation: SimulatedOperation) -> None:
        self._under_way[operation] = None
        operation.rank.engine.at(operation.posted_s, operation.go)

    def next(self, operation: SimulatedOperation, error: Exception | None) -> None:
        self._under_way.pop(operation, None)

    def overdue(self, operation: SimulatedOperation, error: Exception) -> None:
        self._under_way.pop(operation, None)
        operation.give_up(error)

    def fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        under_way, self._under_way = self._under_way, {}
        for operation in under_way:
            operation.give_up(error)
