"""`PassTrace`: the intervals of a forward and a backward pass, each owned by a layer, and the median of many passes."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

OUTSIDE_LAYERS = -1
"""The owner of time that belongs to no layer: functions between layers, and the loss."""
HOOKS = -2
"""The owner of time that measuring itself takes: it counts nowhere."""

Interval = tuple[int, float]
"""The owner, a layer's number or one of the above, and the seconds."""


@dataclass(frozen=True)
class PassTrace:
    """The intervals of a forward and a backward pass."""

    forward: list[Interval]
    backward: list[Interval]
    ready: dict[str, int]
    """The number of backward intervals before each gradient was ready, by parameter, in that order."""

    @property
    def owners(self) -> tuple[list[int], list[int], dict[str, int]]:
        """The same without the seconds, to compare two passes."""
        return [owner for owner, _ in self.forward], [owner for owner, _ in self.backward], self.ready

    def shares(self, num_layers: int) -> "TimeShares":
        """Return the share of each layer in both passes."""
        # elapsed_s[n] is the time of the first n intervals, without hooks.
        elapsed_s = list(accumulate(_counted(self.backward), initial=0.0))
        ready = {name: elapsed_s[passed] / (elapsed_s[-1] or 1.0) for name, passed in self.ready.items()}
        return TimeShares(_parts(self.forward, num_layers), _parts(self.backward, num_layers), ready)


@dataclass(frozen=True)
class TimeShares:
    """Shares of the time of a forward and a backward pass, from 0 to 1."""

    forward: list[float]
    """The share of each layer in forward."""
    backward: list[float]
    """The share of each layer in backward."""
    ready: dict[str, float]
    """The share of backward after which each gradient was ready, by parameter, in that order."""


def median_trace(traces: list[PassTrace]) -> PassTrace:
    """Return the trace of the median length of every interval.

    An interrupted pass is too long in one interval, another pass in another; the median of each interval is right.
    If passes do not go through the same layers, the pass of median length is returned.
    """
    first = traces[0]
    if any(trace.owners != first.owners for trace in traces):
        return sorted(traces, key=lambda trace: sum(_counted(trace.backward)))[len(traces) // 2]
    forward = _medians([trace.forward for trace in traces])
    backward = _medians([trace.backward for trace in traces])
    return PassTrace(forward, backward, first.ready)


def _medians(passes: list[list[Interval]]) -> list[Interval]:
    """Return the median of every interval over passes that have the same owners in the same order."""
    medians = []
    for intervals in zip(*passes, strict=True):
        owner = intervals[0][0]
        medians.append((owner, median(seconds for _, seconds in intervals)))
    return medians


def _counted(intervals: list[Interval]) -> list[float]:
    return [seconds if owner != HOOKS else 0.0 for owner, seconds in intervals]


def _parts(intervals: list[Interval], num_layers: int) -> list[float]:
    spent: dict[int, float] = defaultdict(float)
    for owner, seconds in intervals:
        spent[owner] += seconds
    # Time outside of layers counts in the total, so that the shares of layers may add up to less than 1.
    total_s = sum(_counted(intervals)) or 1.0
    return [spent[number] / total_s for number in range(num_layers)]
