"""`Polling`: detects a rank that asks for unfinished work again and again, so that virtual time can pass meanwhile."""

from tutti.simulation.work import SimulatedWork

MAX_FRUITLESS = 1000
"""Number of polls, or of errors caught, after which a rank for which no virtual time passes is in an endless loop."""


class Polling:
    """The work that one rank has polled at its present time. To poll the same work again means to wait.

    A loop such as `while not any(work.done() for work in works)` polls each work once per round. Only the second round
    must let time pass. Work that is found to be done may change the loop, so the others may then be polled once more.
    """

    def __init__(self) -> None:
        self._moment_s = -1.0
        """Time of the last poll."""
        self._polled: set[SimulatedWork] = set()
        """Work that was polled at this moment and was not done."""
        self._done: set[SimulatedWork] = set()
        """Work that was found to be done at this moment."""
        self._num_fruitless = 0
        """Suspensions in a row during which no time passed."""

    def begin(self, clock_s: float) -> None:
        """Start a poll at that time; at another time than the last one, all earlier polls are forgotten."""
        if self._moment_s != clock_s:
            self._moment_s = clock_s
            self._polled, self._done = set(), set()

    def record_done(self, work: SimulatedWork) -> None:
        """Note that `work` is done. The first time, the others may be polled once more at this moment."""
        if work not in self._done:
            self._done.add(work)
            self._polled.clear()

    def is_repeated(self, work: SimulatedWork) -> bool:
        """Whether `work` was polled before at this moment, or so many others that time has to pass. Notes the poll."""
        repeated = work in self._polled or len(self._polled) >= MAX_FRUITLESS
        self._polled.add(work)
        return repeated

    def record_retry(self, work: SimulatedWork, fruitless: bool) -> bool:
        """Note that the rank was suspended between two polls; whether that was fruitless too many times in a row."""
        self._polled = {work}
        self._num_fruitless = self._num_fruitless + 1 if fruitless else 0
        return self._num_fruitless > MAX_FRUITLESS

    def next_poll_s(self, now_s: float, next_s: float | None) -> float:
        """Return the time of the next poll: that of the next event, or the end of polled work if that is known."""
        # Nothing is scheduled for the end of work that nobody waits for, so it may come before the next event.
        times = [next_s, *(work.finish_s for work in self._polled)]
        return max(now_s, min((time_s for time_s in times if time_s is not None), default=0.0))
