"""Work under way in virtual time."""

from typing import TYPE_CHECKING

from tutti.transports.base import Finished, Steps, Work

if TYPE_CHECKING:
    from tutti.transports.simulated.engine import Action
    from tutti.transports.simulated.rank import Rank


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


class Task(Pending):
    """Steps that are taken while their rank computes: whenever what they wait for is over."""

    def __init__(self, rank: "Rank", steps: Steps, queue: "Tasks") -> None:
        super().__init__(rank)
        self._steps = steps
        self._queue = queue
        self._waits_for: Work | None = None
        self._stepped_s = self.posted_s = rank.time

    def go(self) -> None:
        """Take steps until one has to wait."""
        rank, steps = self.rank, self._steps
        if rank.gone is not None or self.finish_s is not None:  # It may have been given up since this was due.
            return
        now = self._stepped_s = rank.engine.now
        work = self._waits_for
        rank.stepping = True
        try:
            if work is not None and work.error is not None:  # type: ignore[attr-defined]
                raise work.error  # type: ignore[attr-defined]
            for work in steps:
                if work.__class__ is Finished:
                    continue
                finish_s = work.finish_s  # type: ignore[attr-defined]
                if finish_s is None:
                    work.wake = self.go  # type: ignore[attr-defined]
                    break
                if finish_s > now:
                    rank.engine.at(finish_s, self.go)
                    break
                if work.error is not None:  # type: ignore[attr-defined]
                    raise work.error  # type: ignore[attr-defined]
            else:
                self._end(None)
        except Exception as error:
            self._end(error)
        finally:
            rank.stepping = False
        self._waits_for = work

    def _end(self, error: Exception | None) -> None:
        self._steps.close()
        if error is None:
            self.complete(self.rank.engine.now)
        else:
            self.fail(error)
        self._queue.next(error)

    def give_up(self, error: Exception) -> None:
        self._steps.close()
        self.fail(error)

    def overdue(self, error: Exception) -> None:
        self._queue.fail(error)  # Those behind it would be out of step.

    @property
    def under_way_s(self) -> float:
        first = self._queue.first or self  # Those before it go on for it, too.
        waits = first._waits_for
        return max(first._stepped_s, waits.under_way_s if isinstance(waits, Pending) else 0.0)

    def describe(self) -> str:
        waits = self._waits_for
        if self.finish_s is None and isinstance(waits, Pending) and waits.finish_s is None:
            return f"steps under way, which wait for {waits.describe()}"
        return "steps under way"


class Tasks:
    """Steps started on one transport, taken one after the other."""

    def __init__(self) -> None:
        self._queue: list[Task] = []
        self._failure: Exception | None = None

    def add(self, task: Task) -> None:
        if self._failure is not None:
            task.give_up(self._failure)
            return
        self._queue.append(task)
        if len(self._queue) == 1:
            task.rank.engine.at(task.posted_s, task.go)

    @property
    def first(self) -> Task | None:
        return self._queue[0] if self._queue else None

    def next(self, error: Exception | None) -> None:
        """The first is over. After a failure the others would be out of step: they fail too."""
        del self._queue[0]
        if error is not None:
            self.fail(error)
        elif self._queue:
            following = self._queue[0]
            following.rank.engine.at(max(following.rank.engine.now, following.posted_s), following.go)

    def fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        queue, self._queue = self._queue, []
        for task in queue:
            task.give_up(error)
