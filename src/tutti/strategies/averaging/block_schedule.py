"""Block schedules: when a block of local steps ends.

A block ends after a number of steps, after a duration, when the job finishes, or as soon as communication stays below
a share of the time. Schedules that count steps decide alike on every rank, because they use only what all ranks know.
A schedule by duration may end a rank's block at another step than its neighbour's; the exchange allows for that.
"""

import math
import re
from abc import ABC, abstractmethod
from contextlib import suppress
from datetime import timedelta

from tutti.cluster import parse_duration
from tutti.errors import ConfigError
from tutti.strategies.averaging.block_status import BlockStatus

Every = int | str | timedelta
"""Steps in a block; "2s" or a timedelta for blocks of that duration; "auto"; "end" for one block, the whole run."""

MAX_BLOCK_STEPS = 10_000
"""The most steps of a block under `every="auto"`. The cost model limits blocks by duration to it, too."""
_MAX_GROWTH = 16
"""A block has at most this many times the steps of the one before, so that one slow exchange does not decide alone."""


class BlockSchedule(ABC):
    """Decides when blocks end."""

    num_steps = 0
    """Steps in a block, for schedules that count steps; part of a checkpoint."""

    @abstractmethod
    def is_over(self, num_steps: int, seconds: float) -> bool:
        """Return whether a block ends after `num_steps` steps of this rank, which took `seconds` of training."""

    def update(self, status: BlockStatus) -> None:
        """Adapt to the times that all ranks reported at the end of a block."""
        return None


class FixedSteps(BlockSchedule):
    """Every block has the same number of steps."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps

    def is_over(self, num_steps: int, seconds: float) -> bool:
        return num_steps >= self.num_steps


class FixedDuration(BlockSchedule):
    """Every block takes the same time; fast ranks take more steps in it than slow ones."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def is_over(self, num_steps: int, seconds: float) -> bool:
        # Ranks decide by their own clocks. The exchange allows for different numbers of steps.
        return seconds >= self._seconds


class SingleBlock(BlockSchedule):
    """The whole run is one block."""

    def is_over(self, num_steps: int, seconds: float) -> bool:
        return False


class AdaptiveSteps(BlockSchedule):
    """Blocks are as short as possible while communication takes at most `share` of the time.

    With overlap, communication is free as long as it is over when the next block is, so a block need only take as
    long as the exchange.
    """

    def __init__(self, share: float, overlap: bool) -> None:
        # exchange / (exchange + block) = share, solved for block / exchange.
        self._block_per_exchange = 1.0 if overlap else (1 - share) / share
        self.num_steps = 1  # The first block only measures.

    def is_over(self, num_steps: int, seconds: float) -> bool:
        return num_steps >= self.num_steps

    def update(self, status: BlockStatus) -> None:
        # 0 after the first exchange, which is not representative. All ranks have the same status, so all decide alike.
        if status.step_s > 0 and status.exchange_s > 0:
            wanted = math.ceil(self._block_per_exchange * status.exchange_s / status.step_s)
            self.num_steps = max(1, min(wanted, _MAX_GROWTH * self.num_steps, MAX_BLOCK_STEPS))


def check_every(every: object) -> list[str]:
    """Return what is wrong with a value of `every`; an empty list if nothing is."""
    # True is an int in Python, and no number of steps.
    if isinstance(every, int) and not isinstance(every, bool):
        return [] if every >= 1 else [f"every must be 1 step or more, got {every}"]
    if isinstance(every, str | timedelta) and (every in ("auto", "end") or block_seconds(every) > 0):
        return []
    return [f"every must be a number of steps, a time such as '2s' or '500ms', 'auto' or 'end', got {every!r}"]


def make_schedule(every: Every, share: float, overlap: bool) -> BlockSchedule:
    """Return the schedule for a value of `every` that `check_every` has accepted."""
    if isinstance(every, int):
        return FixedSteps(every)
    if every == "end":
        return SingleBlock()
    return AdaptiveSteps(share, overlap) if every == "auto" else FixedDuration(block_seconds(every))


def read_every(text: str) -> Every:
    """Return the value of `every` in a strategy's text: a number of steps, or the text itself."""
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def duration_text(duration: timedelta) -> str:
    """Return the duration as `every` takes it in a text: "2s", "0.5s"."""
    # Down to microseconds, the resolution of a timedelta.
    return f"{duration.total_seconds():.6f}".rstrip("0").rstrip(".") + "s"


def block_seconds(every: str | timedelta) -> float:
    """Return how long "2s", "500ms", "5m" or a timedelta is; 0 if it is no duration, or has no unit."""
    if isinstance(every, str) and not every.strip()[-1:].isalpha():
        return 0.0  # A number in a text is neither clearly a number of steps nor clearly seconds.
    # Not a duration: `check_every` reports it, with everything else that is wrong.
    with suppress(ConfigError):
        return parse_duration(every).total_seconds()
    return 0.0


def check_share(share: float) -> list[str]:
    """Return what is wrong with a share of the time; an empty list if nothing is."""
    return [] if 0 < share < 1 else [f"share must be above 0 and below 1, got {share}"]
