"""`Waiter`: how a simulated rank waits for work, polls it, and gives up at a deadline.

How it works
------------
All methods but `check_deadline` and `next_poll_s` run in the rank's thread; these two run in the engine's. Only one of
the threads runs at a time (see `engine`), so nothing is locked.

`wait`: where the end of the work is known already, the rank's clock jumps there, without a switch of threads. Else the
rank registers `resume` as the work's `on_finish`, sets an alarm, and yields its turn. Completing or failing the
work schedules `on_finish`. If the peer that should do so is gone, its channel fails the work instead.

`poll`: a rank's clock may be ahead of the engine's, so before work is reported as unfinished the engine catches up with
the clock. The second poll at one moment suspends the rank until the next event (see `polling`).

Deadlines: a rank has at most one alarm on the engine's heap. When it goes off, the wait that is current then is
examined. Its deadline counts from the later of its start and the last sign of progress of the work
(`active_until_s`); if that is not over yet, the alarm is set again. So a rank that waits a million times for a short
while sets few alarms.

Two endless loops are ended as a `Deadlock`: polls between which no time can pass, and errors that a rank catches only
to do the same again at the same moment.
"""

from typing import TYPE_CHECKING, NamedTuple

from tutti.errors import DeadlineExceeded, Deadlock
from tutti.simulation.polling import MAX_FRUITLESS, Polling
from tutti.simulation.work import SimulatedWork

if TYPE_CHECKING:
    from tutti.simulation.rank import Rank


class _Wait(NamedTuple):
    """A wait of a rank that has not ended."""

    work: SimulatedWork
    since_s: float
    """The rank's clock when the wait began."""
    travelled_s: float
    """Travel time of all messages to or from the rank when the wait began."""


class Waiter:
    """The waits of one simulated rank."""

    def __init__(self, rank: "Rank") -> None:
        self._rank = rank
        self._wait: _Wait | None = None
        self._alarm_set = False
        """Whether the engine will call `check_deadline`."""
        self._polling = Polling()
        self._failures = (-1.0, 0)  # Time of the last failed wait, and the number of failures at that time.

    @property
    def awaited(self) -> SimulatedWork | None:
        """The work that the rank waits for now, if any."""
        return None if self._wait is None else self._wait.work

    def wait(self, work: SimulatedWork) -> None:
        """Wait until `work` is over, and raise its error if it failed."""
        rank = self._rank
        rank.check_alive()
        # Read before the wait: the increase until its end is the time in which messages travelled.
        travelled_s = rank.travel.before(rank.clock)
        if work.finish_s is None:
            self._wait = _Wait(work, rank.clock, travelled_s)
            work.on_finish = rank.resume  # Called by `complete` or `fail`; a peer's loss and a deadline fail the work.
            if not self._alarm_set:
                self._alarm_set = True
                rank.engine.set_alarm(rank.clock + rank.timeout.total_seconds(), rank.number, self.check_deadline)
            rank.pause()
            self._wait = None
        assert work.finish_s is not None
        # The end may lie before the rank's clock, where work was done while the rank computed: time never goes back.
        # It goes on later than that if it was stopped meanwhile.
        self._advance_clock(max(work.finish_s, rank.engine.now), travelled_s)
        if work.error is not None:
            self._count_failure(work.error)
            raise work.error

    def poll(self, work: SimulatedWork) -> bool:
        """Return whether `work` is over by the rank's clock.

        The second time at one moment it lets virtual time pass until something happens, or a loop that polls would
        never end.
        """
        rank = self._rank
        rank.check_alive()
        if work.finish_s is None:  # Events before the clock may still end it.
            self.catch_up()
        self._polling.begin(rank.clock)
        if self._is_over(work):
            self._polling.record_done(work)
        elif self._polling.is_repeated(work):
            self._suspend_until_next_event(work)
        return self._is_over(work)

    def next_poll_s(self, next_s: float | None) -> float:
        """Return the time at which the polling rank is resumed, if the next event is at `next_s`."""
        return self._polling.next_poll_s(self._rank.engine.now, next_s)

    def interrupt(self, time_s: float) -> bool:
        """Account for a wait that the rank's death ends at `time_s`; False if it does not wait."""
        if self._wait is None:
            return False
        self._rank.spend_waiting(time_s, self._wait.travelled_s)
        return True

    def check_deadline(self) -> None:
        """Fail the work that the rank waits for if the deadline has passed; set the alarm again if it has not."""
        rank, wait, limit_s = self._rank, self._wait, self._rank.timeout.total_seconds()
        if wait is None or wait.work.finish_s is not None or rank.thread.ended:
            self._alarm_set = False  # The next wait sets an alarm of its own.
            return
        work = wait.work
        due_s = max(wait.since_s, work.active_until_s) + limit_s
        if due_s > rank.engine.now:
            rank.engine.set_alarm(due_s, rank.number, self.check_deadline)
            return
        self._alarm_set = False
        # It fails the work, whose `on_finish` then resumes the rank, where `wait` raises the error.
        work.time_out(
            DeadlineExceeded(
                f"rank {rank.number}: waited {limit_s:g} s of simulated time for {work.describe()}, and no rank is "
                "gone. If the work is just slow, allow more time: tutti.simulate(..., timeout=...)."
            )
        )

    def _is_over(self, work: SimulatedWork) -> bool:
        return work.finish_s is not None and work.finish_s <= self._rank.clock

    def _let_engine_catch_up(self) -> None:
        """Yield the turn until the engine has handled all events before the rank's clock."""
        rank = self._rank
        travelled_s = rank.travel.before(rank.clock)
        rank.engine.schedule(rank.clock, rank.resume)
        rank.pause()
        rank.spend_waiting(rank.engine.now, travelled_s)  # It may have been stopped meanwhile.

    def catch_up(self) -> None:
        """Let everything happen that is due before this rank's clock."""
        if self._rank.engine.now < self._rank.clock:
            self._let_engine_catch_up()

    def _suspend_until_next_event(self, work: SimulatedWork) -> None:
        """Yield the turn until something else happens, and move the clock there."""
        rank = self._rank
        self.catch_up()
        travelled_s = rank.travel.before(rank.clock)
        self._wait = _Wait(work, rank.clock, travelled_s)
        rank.engine.poll_later(rank)
        rank.pause()
        self._wait = None
        # Resumed with no time passed, many times in a row: nothing is scheduled that could end the work.
        if self._polling.record_retry(work, fruitless=rank.engine.now == rank.clock):
            raise Deadlock(f"rank {rank.number} polls {work.describe()} again and again, and nothing else happens.")
        self._advance_clock(rank.engine.now, travelled_s)

    def _advance_clock(self, time_s: float, travelled_s: float) -> None:
        rank = self._rank
        rank.spend_waiting(min(time_s, rank.dies_s), travelled_s)
        rank.check_alive()

    def _count_failure(self, error: Exception) -> None:
        """End a rank that catches its errors and does the same again for ever, while no time passes."""
        rank = self._rank
        last_s, number = self._failures
        self._failures = (rank.clock, number + 1 if last_s == rank.clock else 1)
        if self._failures[1] > MAX_FRUITLESS:
            # Not raised here: the loop would catch it like the others. `check_alive` unwinds by `Stopped`.
            rank.thread.doom = Deadlock(
                f"rank {rank.number} has caught {MAX_FRUITLESS} errors at one moment and continues. The last: {error}"
            )
            rank.check_alive()
