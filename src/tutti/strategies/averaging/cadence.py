"""When a block of local steps ends."""

import math
import re
from abc import ABC, abstractmethod

from tutti.strategies.averaging.block_status import Roll

Every = int | str
"""Steps in a block, "2s" for blocks of that much time, "auto", or "end" for one block that is the whole run."""

_MOST = 10_000
_GROWTH = 16
"""A block may be this many times as long as the one before, whatever happened to one exchange."""


class Cadence(ABC):
    """Decides when blocks end; the same everywhere, from what all know, unless it goes by the clock."""

    length = 0
    """Steps in a block, where that is how it decides."""

    @abstractmethod
    def due(self, steps: int, seconds: float) -> bool:
        """Whether a block of so many steps of this rank, in so much time, is over."""

    def learn(self, roll: Roll) -> None:
        """Take note of what ranks said at the end of a block."""
        return None


class AfterSteps(Cadence):
    """So many steps make a block."""

    def __init__(self, length: int) -> None:
        self.length = length

    def due(self, steps: int, seconds: float) -> bool:
        return steps >= self.length


class AfterSeconds(Cadence):
    """So much time makes a block, in which fast ranks take more steps than slow ones."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def due(self, steps: int, seconds: float) -> bool:
        return seconds >= self._seconds


class AtEnd(Cadence):
    """The whole run is one block."""

    def due(self, steps: int, seconds: float) -> bool:
        return False


class Adaptive(Cadence):
    """Blocks as short as they may be for communication to take at most a share of the time."""

    def __init__(self, share: float, overlap: bool) -> None:
        # What computation hides costs nothing, as long as it is over when the next block is.
        self._blocks_worth = 1.0 if overlap else (1 - share) / share
        self.length = 1

    def due(self, steps: int, seconds: float) -> bool:
        return steps >= self.length

    def learn(self, roll: Roll) -> None:
        if roll.step_s > 0 and roll.exchange_s > 0:
            wanted = math.ceil(self._blocks_worth * roll.exchange_s / roll.step_s)
            self.length = max(1, min(wanted, _GROWTH * self.length, _MOST))


def check_every(every: object) -> list[str]:
    """What is wrong with it."""
    if isinstance(every, int) and not isinstance(every, bool):
        return [] if every >= 1 else [f"every must be 1 step or more, got {every}"]
    if isinstance(every, str) and (every in ("auto", "end") or _seconds(every) > 0):
        return []
    return [f"every must be a number of steps, a time such as '2s' or '500ms', 'auto' or 'end', got {every!r}"]


def cadence(every: Every, share: float, overlap: bool) -> Cadence:
    """At work; `every` has been checked."""
    if isinstance(every, int):
        return AfterSteps(every)
    if every == "end":
        return AtEnd()
    return Adaptive(share, overlap) if every == "auto" else AfterSeconds(_seconds(every))


def read_every(text: str) -> Every:
    """From the command line."""
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def _seconds(text: str) -> float:
    """How long "2s", "500ms" or "1.5s" is; 0 if it is no time."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|ms)", text)
    return 0.0 if found is None else float(found[1]) * (1.0 if found[2] == "s" else 1e-3)


def check_share(share: float) -> list[str]:
    return [] if 0 < share < 1 else [f"share must be above 0 and below 1, got {share}"]
