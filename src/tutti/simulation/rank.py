"""A simulated rank: its thread, its clock, and what it spent its time on."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from tutti.cluster import Cluster, Host, format_time
from tutti.errors import ConfigError, DeadlineExceeded, Deadlock, RankLost
from tutti.simulation.engine import Engine
from tutti.simulation.polling import IN_VAIN, Polling
from tutti.simulation.randomness import Randomness
from tutti.simulation.time_account import ComputeSpeed, TimeAccount
from tutti.simulation.work import Pending

if TYPE_CHECKING:
    from tutti.simulation.messages import SimulatedChannel

_TABLE_ROWS = 24

_STOPS = 20
"""How often a function may catch what unwinds it before its thread is left where it is."""


class Stopped(BaseException):
    """Unwinds the thread of a rank that is to go no further. Not an error: nobody should catch it."""


class _Wait(NamedTuple):
    """What a rank waits for."""

    work: Pending
    since_s: float
    moved_s: float
    """How long messages to or from it had travelled before."""


class Rank:
    """One simulated rank.

    Its clock may be ahead of the engine's: it computes as far as it can without knowing what others did meanwhile. What
    it sends is put on the agenda at the time of its own clock, and before it looks at anything the engine catches up.
    """

    def __init__(self, engine: Engine, number: int, host: Host, cluster: Cluster, timeout: timedelta) -> None:
        self.engine = engine
        self.number = number
        self.host = host
        self.timeout = timeout
        self.clock = 0.0
        self.stepping = False
        """Whether steps of this rank are being taken, at the engine's time and not at the rank's own."""
        self.turn = threading.Lock()
        self.turn.acquire()
        self.paused = True
        """Whether its thread waits for its turn."""
        self.randomness = Randomness()
        self.channels: list[SimulatedChannel] = []
        self.ended = False
        self.gone: str | None = None
        self.fled = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.time_account = TimeAccount()
        self.moving_s = self.moving_until_s = 0.0
        self.num_messages = 0
        self._speed = ComputeSpeed(cluster, number, cluster.speed_of(number, host))
        self._dies_s = cluster.failures.get(number, float("inf"))
        self.died = False
        self._wait: _Wait | None = None
        self._alarmed = False
        self._polling = Polling()
        self._failures = (-1.0, 0)  # When the last one was, and how many there were at that moment.
        self._num_stops = 0
        self._doom: Deadlock | None = None
        self._abandoned = False
        self._thread: threading.Thread | None = None

    @property
    def time(self) -> float:
        """What time it is for whoever acts for this rank now."""
        return self.engine.now if self.stepping else self.clock

    # The thread

    def start(self, function: Callable[[], Any]) -> None:
        """Make the thread; it runs when it is given its turn."""
        thread = threading.Thread(target=self._run, args=(function,), name=f"rank {self.number}", daemon=True)
        thread.start()
        self._thread = thread
        self.engine.at(0.0, self.resume)
        if self._dies_s < float("inf"):
            self.engine.at(self._dies_s, self._die)

    @property
    def alive(self) -> bool:
        """Whether there is a thread to end."""
        return self._thread is not None and not self.ended

    def join(self, seconds: float | None = None) -> None:
        """Wait for the end of the thread, unless it was left where it is."""
        if self._thread is not None and not self._abandoned:
            self._thread.join(seconds)

    def _run(self, function: Callable[[], Any]) -> None:
        self.turn.acquire()
        try:
            if not self.engine.stopping:
                self.result = function()
        except Stopped:
            pass
        except SystemExit as error:
            self.error = error if error.code else None
        except BaseException as error:
            self.error = error
        finally:
            self.error = None if self.died else self._doom or self.error
            self.ended = True
            self.engine.take_turn()

    def resume(self) -> None:
        """Let the thread go on; on the engine's agenda."""
        if self.ended:
            return
        self.engine.give_turn(self)
        if self.ended:
            self.time_account.flush()
            knocked_on = isinstance(self.error, RankLost)
            how = "it has left" if self.error is None else f"it failed: {type(self.error).__name__}"
            self.engine.at(max(self.clock, self.engine.now), lambda: self.leave(how, fled=knocked_on))

    def leave(self, how: str, fled: bool = False) -> None:
        """Answer nobody any more."""
        if self.gone is None:
            self.gone, self.fled = how, fled
            for channel in list(self.channels):
                channel.close(self, how)

    def _die(self) -> None:
        if self.ended and not self.died:
            return
        self.died = True
        self.leave(self._how_it_died)
        if self._wait is not None and not self.ended:
            self._spend_waiting(self._dies_s, self._wait.moved_s)
            self.resume()

    @property
    def _how_it_died(self) -> str:
        return f"it died at {format_time(self._dies_s)}"

    def _yield(self) -> None:
        """Let the engine go on until it resumes this rank."""
        self.check_alive()
        self.paused = True
        self.engine.take_turn()
        self.turn.acquire()
        self.check_alive()

    def check_alive(self) -> None:
        """Unwind the thread if this rank is to go no further."""
        if self.stepping:
            raise ConfigError(f"rank {self.number}: steps yield the work they wait for; they neither wait nor compute.")
        if self.clock >= self._dies_s:
            self.died = True
        elif not self.engine.stopping and self.gone is None and self._doom is None:
            return
        self._num_stops += 1
        if self._num_stops > _STOPS:
            self._abandon()
        raise Stopped

    def _abandon(self) -> None:
        """Go on without this thread, whose function cannot be ended: it waits until the process does."""
        self._abandoned = self.ended = True
        self.error = None if self.died else self._doom
        self.engine.take_turn()
        threading.Event().wait()

    # Time

    def elapse(self, seconds: float) -> None:
        """Compute for as long as a rank of speed 1 would in `seconds`."""
        stop_s = min(self._speed.until(self.clock, seconds), self._dies_s)
        self.time_account.computed(self.clock, stop_s)
        self.clock = stop_s
        self.check_alive()

    def wait(self, work: Pending) -> None:
        """Wait until `work` is over, and raise if it failed."""
        self.check_alive()
        moved_s = self._moved_until(self.clock)
        if work.finish_s is None:
            self._wait = _Wait(work, self.clock, moved_s)
            work.wake = self.resume
            if not self._alarmed:
                self._alarmed = True
                self.engine.alarm(self.clock + self.timeout.total_seconds(), self)
            self._yield()
            self._wait = None
        assert work.finish_s is not None
        self._waited_until(work.finish_s, moved_s)
        if work.error is not None:
            self._failed(work.error)
            raise work.error

    def _failed(self, error: Exception) -> None:
        """End a rank that catches its errors and does the same again, for ever."""
        last_s, number = self._failures
        self._failures = (self.clock, number + 1 if last_s == self.clock else 1)
        if self._failures[1] > IN_VAIN:
            self._doom = Deadlock(
                f"rank {self.number} has caught {IN_VAIN} errors at one moment and goes on. The last: {error}"
            )
            self.check_alive()

    def knows(self, work: Pending) -> bool:
        """Whether `work` is over by this rank's clock.

        Asked again at the same moment, it lets time pass until something happens: or a loop that asks and asks would
        never end.
        """
        self.check_alive()
        if work.finish_s is None and self.engine.now < self.clock:
            self._catch_up()
        self._polling.begin(self.clock)
        if self._over(work):
            self._polling.found(work)
        elif self._polling.again(work):
            self._look_later(work)
        return self._over(work)

    def _over(self, work: Pending) -> bool:
        return work.finish_s is not None and work.finish_s <= self.clock

    def _catch_up(self) -> None:
        self.engine.at(self.clock, self.resume)
        self._yield()

    def _look_later(self, work: Pending) -> None:
        if self.engine.now < self.clock:
            self._catch_up()
        moved_s = self._moved_until(self.clock)
        self._wait = _Wait(work, self.clock, moved_s)
        self.engine.look_later(self)
        self._yield()
        self._wait = None
        if self._polling.looked(work, in_vain=self.engine.now == self.clock):
            raise Deadlock(f"rank {self.number} asks again and again for {work.describe()}, and nothing else goes on.")
        self._waited_until(self.engine.now, moved_s)

    def looks_again_s(self, next_s: float | None) -> float:
        """When a rank that asks again and again is to be resumed, if the next thing happens at `next_s`."""
        return self._polling.again_s(self.engine.now, next_s)

    def _waited_until(self, time_s: float, moved_s: float) -> None:
        self._spend_waiting(min(time_s, self._dies_s), moved_s)
        self.check_alive()

    def _spend_waiting(self, time_s: float, moved_s: float) -> None:
        spent_s = time_s - self.clock
        if spent_s <= 0:
            return
        communicating_s = min(spent_s, max(0.0, self._moved_until(time_s) - moved_s))
        self.time_account.waited(self.clock, time_s, communicating_s)
        self.clock = time_s

    def ring(self) -> None:
        """Look whether this rank has waited for too long."""
        wait, limit_s = self._wait, self.timeout.total_seconds()
        if wait is None or wait.work.finish_s is not None or self.ended:
            self._alarmed = False
            return
        work = wait.work
        due_s = max(wait.since_s, work.under_way_s) + limit_s
        if due_s > self.engine.now:
            self.engine.alarm(due_s, self)
            return
        self._alarmed = False
        work.overdue(
            DeadlineExceeded(
                f"rank {self.number}: waited {limit_s:g} s of simulated time for {work.describe()}, and no rank is "
                "gone. If the work is just slow, give more: tutti.simulate(..., timeout=...)."
            )
        )

    def moving(self, start_s: float, stop_s: float) -> None:
        """A message to or from this rank travels."""
        until_s = self.moving_until_s
        if stop_s > until_s:
            self.moving_s += stop_s - (start_s if start_s > until_s else until_s)
            self.moving_until_s = stop_s

    def _moved_until(self, time_s: float) -> float:
        return self.moving_s - max(0.0, self.moving_until_s - time_s)

    # When nothing goes on

    def stuck(self, ranks: list["Rank"]) -> Deadlock:
        """The error that says who waits for whom."""
        rows = [f"  rank {rank.number:<4} at {format_time(rank.clock):>8}  {rank.status()}" for rank in ranks]
        if len(rows) > _TABLE_ROWS:
            rows = [*rows[:_TABLE_ROWS], f"  ... and {len(rows) - _TABLE_ROWS} more"]
        return Deadlock("deadlock: every rank that has not ended waits for another.\n" + "\n".join(rows))

    def status(self) -> str:
        if self.gone is not None or self.ended:
            return "has ended" if self.error is None else f"has failed: {type(self.error).__name__}"
        return "runs" if self._wait is None else f"waits for {self._wait.work.describe()}"
