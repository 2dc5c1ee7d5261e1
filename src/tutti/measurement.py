"""Measurements that say how far they can be trusted: spread, other processes' share of the CPU, limits of hardware.

Planner, profiler and benchmarks use it. Noise makes times longer and hardly ever shorter, so of several attempts the
one with the lowest median counts. A rate beyond `largest_rate` is an error of the measurement and not a property of
the link.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from tutti.cluster import format_time

T = TypeVar("T")

_MOST_SPREAD = 0.25
"""Largest difference of the quartiles, relative to the median, of a measurement that is trusted."""
_MOST_OTHERS = 0.25
"""Largest share of the CPU that other processes may use during a measurement that is trusted."""
_ATTEMPTS = 2
"""How often repetitions are measured, if those of one attempt differ too much."""

_COPY_BYTES, _NUM_COPIES = 256 * 1024, 32
"""Size of the copies by which `largest_rate` is measured: it fits into a core's cache. The fastest counts."""
_CORES = 4
"""Number of cores that can move one message together."""


@dataclass(frozen=True)
class CpuUse:
    """CPU seconds since some moment: of the whole machine, used and idle, and of this process."""

    used_s: float
    idle_s: float
    own_s: float

    @classmethod
    def now(cls) -> "CpuUse | None":
        """Return the seconds so far; None where the system does not count them."""
        try:
            line = Path("/proc/stat").read_text().partition("\n")[0]
        except OSError:
            return None
        own = os.times()
        return cls.from_line(line, own.user + own.system, os.sysconf("SC_CLK_TCK"))

    @classmethod
    def from_line(cls, line: str, own_s: float, ticks_per_s: int) -> "CpuUse":
        """Read the first line of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal in ticks."""
        ticks = [int(word) / ticks_per_s for word in line.split()[1:9]]
        # Idle, and waiting for disks, during which a core is free as well.
        idle_s = sum(ticks[3:5])
        return cls(sum(ticks) - idle_s, idle_s, own_s)

    def others(self, later: "CpuUse", own_s: float | None = None) -> float:
        """Return the share of the machine's CPU time that other processes used until `later`, from 0 to 1.

        Args:
            own_s: seconds that the measured processes used, if that is more than this one.
        """
        used_s, own_s = later.used_s - self.used_s, later.own_s - self.own_s if own_s is None else own_s
        total_s = used_s + later.idle_s - self.idle_s
        # At least 0: clock ticks are coarse, and the two counters are not read at the same instant.
        return max(0.0, used_s - own_s) / total_s if total_s > 0 else 0.0


@dataclass(frozen=True)
class Spread:
    """How far the repetitions of a measurement differ, and what other processes did meanwhile."""

    median_s: float
    low_s: float
    """First quartile, in seconds."""
    high_s: float
    """Third quartile, in seconds."""
    others: float = 0.0
    """Share of the CPU that other processes used during the measurement, from 0 to 1."""

    @classmethod
    def of(cls, times: Sequence[float], others: float = 0.0) -> "Spread":
        """Return the spread of times in seconds, of which there is one at least."""
        known = times if len(times) > 1 else [*times, *times]  # Quantiles need two.
        low_s, median_s, high_s = statistics.quantiles(known, method="inclusive")
        return cls(median_s, low_s, high_s, others)

    @property
    def relative(self) -> float:
        """Difference of the quartiles, relative to the median."""
        return (self.high_s - self.low_s) / self.median_s if self.median_s > 0 else 0.0

    @property
    def steady(self) -> bool:
        """Whether repetitions differ little enough for the median to be used."""
        return self.relative <= _MOST_SPREAD

    @property
    def doubt(self) -> str:
        """One line that says why the measurement should not be trusted, and what to do; empty if it can be."""
        reasons = [] if self.steady else [f"repetitions differ by {self.relative:.0%}"]
        if self.others > _MOST_OTHERS:
            reasons.append(f"other processes used {self.others:.0%} of the CPU")
        if not reasons:
            return ""
        return f"Do not trust these times: {' and '.join(reasons)}. Measure again when the machine is idle."

    def __str__(self) -> str:
        return f"{format_time(self.low_s)} to {format_time(self.high_s)} in half of the repetitions"


def steadiest(measure: Callable[[], list[T]], seconds: Callable[[T], float]) -> tuple[list[T], Spread]:
    """Return repetitions of a measurement, and their spread; measured once more if they differ too much.

    Args:
        measure: makes one attempt and returns its repetitions.
        seconds: returns the time of a repetition.
    """
    attempts: list[tuple[list[T], Spread]] = []
    while len(attempts) < _ATTEMPTS and not (attempts and attempts[-1][1].steady):
        before = CpuUse.now()
        results = measure()
        after = CpuUse.now()
        others = before.others(after) if before is not None and after is not None else 0.0
        attempts.append((results, Spread.of([seconds(result) for result in results], others)))
    # A steady attempt before a faster one: the median of one that is not steady says little.
    return min(attempts, key=lambda attempt: (not attempt[1].steady, attempt[1].median_s))


@cache
def largest_rate() -> float:
    """Return the bits per second that no link of this machine can exceed: what a few cores copy within their caches."""
    source, target = bytes(_COPY_BYTES), memoryview(bytearray(_COPY_BYTES))
    fastest_s = float("inf")
    for _ in range(_NUM_COPIES):
        start_s = time.perf_counter()
        target[:] = source
        fastest_s = min(fastest_s, time.perf_counter() - start_s)
    # 8 bits per byte. The least time that counts is 100 ns, in case the clock does not see the copy at all.
    return _CORES * 8 * _COPY_BYTES / max(fastest_s, 1e-7)


def bounded(bits_per_s: float, limit: float) -> tuple[float, str]:
    """Return the rate or the limit, whichever is lower, and a note if it is the limit.

    A rate of 0 or less, which noise can give, counts as beyond the limit.
    """
    if 0 < bits_per_s <= limit:
        return bits_per_s, ""
    return limit, (
        f"The rate of a link could not be measured: it came out above {limit / 1e9:,.0f} Gbit/s, which this machine "
        "cannot reach and which is used instead. Measure again when the machine is idle."
    )
