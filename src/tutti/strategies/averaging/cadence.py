"""When a block of local steps ends."""

import math
import re
from abc import ABC, abstractmethod
from contextlib import suppress
from datetime import timedelta

from tutti.cluster import parse_duration
from tutti.errors import ConfigError
from tutti.strategies.averaging.block_status import Roll

Every = int | str | timedelta
"""Steps in a block; "2s" or a timedelta for blocks of that duration; "auto"; "end" for one block, the whole run."""

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
    if isinstance(every, str | timedelta) and (every in ("auto", "end") or block_seconds(every) > 0):
        return []
    return [f"every must be a number of steps, a time such as '2s' or '500ms', 'auto' or 'end', got {every!r}"]


def cadence(every: Every, share: float, overlap: bool) -> Cadence:
    """At work; `every` has been checked."""
    if isinstance(every, int):
        return AfterSteps(every)
    if every == "end":
        return AtEnd()
    return Adaptive(share, overlap) if every == "auto" else AfterSeconds(block_seconds(every))


def read_every(text: str) -> Every:
    """From the command line."""
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def duration_text(duration: timedelta) -> str:
    """Return the duration as `every` takes it in a text: "2s", "0.5s"."""
    return f"{duration.total_seconds():.6f}".rstrip("0").rstrip(".") + "s"


def block_seconds(every: str | timedelta) -> float:
    """Return how long "2s", "500ms", "5m" or a timedelta is; 0 if it is no duration, or has no unit."""
    if isinstance(every, str) and not every.strip()[-1:].isalpha():
        return 0.0  # A number in a text is neither clearly a number of steps nor clearly seconds.
    with suppress(ConfigError):
        return parse_duration(every).total_seconds()
    return 0.0


def check_share(share: float) -> list[str]:
    return [] if 0 < share < 1 else [f"share must be above 0 and below 1, got {share}"]
