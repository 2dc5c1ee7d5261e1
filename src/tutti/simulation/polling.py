"""Ranks that ask whether work is over, again and again."""

from tutti.simulation.work import Pending

IN_VAIN = 1000
"""How often a rank may ask, or fail, without a moment passing."""


class Polling:
    """What a rank has asked for at this moment: to ask for the same again means to wait."""

    def __init__(self) -> None:
        self._moment_s = -1.0
        self._asked: set[Pending] = set()
        self._found: set[Pending] = set()
        self._in_vain = 0

    def begin(self, clock_s: float) -> None:
        """A rank asks at that time."""
        if self._moment_s != clock_s:
            self._moment_s = clock_s
            self._asked, self._found = set(), set()

    def found(self, work: Pending) -> None:
        """It is over: news, after which one may ask for the others again."""
        if work not in self._found:
            self._found.add(work)
            self._asked.clear()

    def again(self, work: Pending) -> bool:
        """Whether this was asked for before, at this moment."""
        before = work in self._asked or len(self._asked) >= IN_VAIN
        self._asked.add(work)
        return before

    def looked(self, work: Pending, in_vain: bool) -> bool:
        """Some time was let pass, or none could be; whether that is so for too often."""
        self._asked = {work}
        self._in_vain = self._in_vain + 1 if in_vain else 0
        return self._in_vain > IN_VAIN

    def again_s(self, now_s: float, next_s: float | None) -> float:
        """When to look again, if the next thing happens at `next_s`."""
        times = [next_s, *(work.finish_s for work in self._asked)]
        return max(now_s, min((time_s for time_s in times if time_s is not None), default=0.0))
