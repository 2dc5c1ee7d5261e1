"""Work in virtual time: sends, receives and operations of simulated ranks, and the order in which operations advance.

How it works
------------
`SimulatedWork.finish_s` is None until the end of the work is known; from then on it is that time, which may lie in the
future. Work is over for a rank whose clock has reached `finish_s`. `on_finish` is the callback of the one that waits;
completing the work schedules it for that time.

An operation is a generator that yields the work it waits for. `SimulatedOperation.advance` runs it until it yields
work that is not over at the engine's time, and registers itself as that work's `on_finish`. It is always an action of
the engine, and runs in the engine's thread; `rank.stepping` is set meanwhile, and waiting or computing is refused.
The error of work that has failed is thrown into the generator, which may catch it and continue.

A transport has two collections of operations. Those of an `OperationSequence` (`Transport.start`) run one after the
other: only the first is advanced, and a failure fails all that follow, because the peers would be in other operations.
Those of `ConcurrentOperations` (`Transport.spawn`) are independent, and fail alone.
"""

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from tutti.transports.base import CompletedWork, Operation, Signal, Work

if TYPE_CHECKING:
    from tutti.simulation.engine import Action
    from tutti.simulation.rank import Rank


class SimulatedWork(Work):
    """Work of a simulated rank. Its end may be known before it is reached."""

    __slots__ = ("error", "finish_s", "on_finish", "rank")

    def __init__(self, rank: "Rank") -> None:
        self.rank = rank
        self.finish_s: float | None = None
        """Virtual time at which the work ends or has ended; None as long as that is not known."""
        self.error: Exception | None = None
        self.on_finish: Action | None = None
        """Action at its end: `resume` of the rank, or `advance` of the operation, that waits for this work."""

    def done(self) -> bool:
        return self.rank.waiter.poll(self)

    def wait(self) -> None:
        self.rank.waiter.wait(self)

    def complete(self, time_s: float) -> None:
        """Set the time at which the work ends, now or later, and schedule `on_finish` there."""
        self.finish_s = time_s
        if self.on_finish is not None:
            self.rank.engine.schedule(time_s, self.on_finish)
            self.on_finish = None  # After a deadline it may be completed a second time: nobody waits then.

    def fail(self, error: Exception) -> None:
        """End the work now with an error, unless its end is known already."""
        if self.finish_s is None:
            self.error = error
            self.complete(self.rank.engine.now)

    def time_out(self, error: Exception) -> None:
        """End the work, because the rank or operation that waits for it has reached its deadline."""
        self.fail(error)

    @property
    def active_until_s(self) -> float:
        """Time of the last known progress, from which a deadline counts; 0 where nothing is known."""
        return 0.0

    def describe(self) -> str:
        """Describe the work for error messages, to follow "waits for"."""
        raise NotImplementedError


class SimulatedOperation(SimulatedWork):
    """An operation that advances in the background, whenever the work it waits for is over."""

    def __init__(
        self, rank: "Rank", operation: Operation, queue: "OperationSequence", has_deadline: bool = True
    ) -> None:
        super().__init__(rank)
        self._has_deadline = has_deadline
        self._operation = operation
        self._queue = queue
        self._awaited: SimulatedWork | None = None
        # When it last made progress, and when it was started.
        self._advanced_s = self.posted_s = rank.time

    def advance(self) -> None:
        """Run the generator until it waits for something, or ends. An action of the engine."""
        rank, operation = self.rank, self._operation
        if rank.gone is not None or self.finish_s is not None:  # It may have been aborted since this was scheduled.
            return
        if rank.stopped is not None:
            rank.stopped.append(self.advance)
            return
        self._advanced_s = rank.engine.now
        rank.stepping = True
        try:
            # The work it waited for may have failed: the generator gets that error at its `yield`.
            failure = None if self._awaited is None else self._awaited.error
            rest: Iterator[Any]
            while True:
                # What `throw` returns is the work that the generator yields next: it has to be looked at as well.
                rest = operation if failure is None else chain((operation.throw(failure),), operation)
                if (failure := self._advance_through(rest)) is None:
                    break
        except StopIteration:
            self._end(None)
        except Exception as error:
            self._end(error)
        finally:
            rank.stepping = False

    def _advance_through(self, works: Iterator[Any]) -> Exception | None:
        """Take work after work until one is not over (returns None) or has failed (returns its error).

        Raises `StopIteration` at the end of the operation.
        """
        rank = self.rank
        now = rank.engine.now
        for work in works:
            if work.__class__ is CompletedWork:  # It has no `finish_s`; an exact class check is the cheapest.
                continue
            self._awaited = work
            finish_s = work.finish_s
            if finish_s is None:  # Completing or failing the work schedules `advance`.
                work.on_finish = self.advance
                return None
            if finish_s > now:  # The end is known and lies in the future.
                rank.engine.schedule(finish_s, self.advance)
                return None
            if work.error is not None:
                return work.error
        raise StopIteration

    def _end(self, error: Exception | None) -> None:
        self._operation.close()  # A no-op, unless it yielded something that is no work.
        if error is None:
            self.complete(self.rank.engine.now)
        else:
            self.fail(error)
        self._queue.remove_ended(self, error)

    def abort(self, error: Exception) -> None:
        """End the operation with an error, whatever it waits for."""
        try:
            self._operation.close()
        except ValueError:
            return  # The generator runs at this moment: it closes its own transport, and its own end counts.
        self.fail(error)

    def time_out(self, error: Exception) -> None:
        self._queue.time_out(self, error)

    @property
    def active_until_s(self) -> float:
        if not self._has_deadline:  # As if it had just made progress: the deadline never comes.
            return self.rank.engine.now
        first = self._queue.first or self  # Progress of an operation before it is progress towards this one.
        awaited = first._awaited
        return max(first._advanced_s, awaited.active_until_s if isinstance(awaited, SimulatedWork) else 0.0)

    def describe(self) -> str:
        awaited = self._awaited
        if self.finish_s is None and isinstance(awaited, SimulatedWork) and awaited.finish_s is None:
            return f"an operation in progress, which waits for {awaited.describe()}"
        return "an operation in progress"


class SimulatedSignal(SimulatedWork, Signal):
    """Work that is done from the moment at which `set` is called."""

    def set(self) -> None:
        self.complete(self.rank.engine.now)

    def describe(self) -> str:
        return "a signal of its own operations"


class OperationSequence:
    """Operations started on one transport, which run one after the other."""

    def __init__(self) -> None:
        self._queue: list[SimulatedOperation] = []
        self._failure: Exception | None = None

    def start(self, rank: "Rank", operation: Operation, has_deadline: bool = True) -> SimulatedOperation:
        """Run an operation after all that were started before it. After a failure it fails at once."""
        started = SimulatedOperation(rank, operation, self, has_deadline)
        if self._failure is not None:
            started.abort(self._failure)
        else:
            self._add(started)
        return started

    def _add(self, operation: SimulatedOperation) -> None:
        self._queue.append(operation)
        if len(self._queue) == 1:  # Else `remove_ended` starts it, when those before it have ended.
            operation.rank.engine.schedule(operation.posted_s, operation.advance)

    @property
    def first(self) -> SimulatedOperation | None:
        """The operation that is advanced now."""
        return self._queue[0] if self._queue else None

    def remove_ended(self, operation: SimulatedOperation, error: Exception | None) -> None:
        """Remove an operation that has ended, the first, and start the next one.

        After a failure the others fail too: the peers would take their messages for those of other operations.
        """
        if self.first is operation:  # Else it closed its own transport, and `fail` has emptied the queue.
            del self._queue[0]
        if error is not None:
            self.fail(error)
        elif self._queue:
            following = self._queue[0]
            engine = following.rank.engine
            # A rank computes ahead of the engine: an operation must not begin before it was posted.
            engine.schedule(max(engine.now, following.posted_s), following.advance)

    def time_out(self, operation: SimulatedOperation, error: Exception) -> None:
        """Fail all operations, because somebody has waited for one of them until the deadline."""
        self.fail(error)

    def fail(self, error: Exception) -> None:
        """Fail all operations, and those that are started later."""
        self._failure = self._failure or error  # The first failure is the cause of the others.
        queue, self._queue = self._queue, []  # Emptied first: an abort may come back here.
        for operation in queue:
            operation.abort(error)


class ConcurrentOperations(OperationSequence):
    """Operations started on one transport, which run independently of each other."""

    def __init__(self) -> None:
        super().__init__()
        # A dict as an ordered set: in the order of starting, and quick to remove from where there are thousands.
        self._running: dict[SimulatedOperation, None] = {}

    def _add(self, operation: SimulatedOperation) -> None:
        self._running[operation] = None
        operation.rank.engine.schedule(operation.posted_s, operation.advance)

    def remove_ended(self, operation: SimulatedOperation, error: Exception | None) -> None:
        self._running.pop(operation, None)

    def time_out(self, operation: SimulatedOperation, error: Exception) -> None:
        self._running.pop(operation, None)
        operation.abort(error)

    def fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        running, self._running = self._running, {}
        for operation in running:
            operation.abort(error)
