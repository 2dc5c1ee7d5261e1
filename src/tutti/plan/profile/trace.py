"""A pass taken apart into intervals, each of which is somebody's; and what many passes have in common."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

BETWEEN = -1
"""Whose time it is when it is no layer's: functions between layers, the loss."""
HOOKS = -2
"""Time that passes only because it is measured: it counts nowhere."""

Interval = tuple[int, float]
"""Whose, a layer's number or one of the above; and its seconds."""


@dataclass(frozen=True)
class Trace:
    """A pass forward and backward."""

    forward: list[Interval]
    backward: list[Interval]
    ready: dict[str, int]
    """How many intervals of backward had passed when a parameter's gradient was there, by name, in that order."""

    @property
    def course(self) -> tuple[list[int], list[int], dict[str, int]]:
        """Without the seconds."""
        return [whose for whose, _ in self.forward], [whose for whose, _ in self.backward], self.ready

    def shares(self, num_layers: int) -> "Shares":
        elapsed_s = list(accumulate(_counted(self.backward), initial=0.0))
        ready = {name: elapsed_s[passed] / (elapsed_s[-1] or 1.0) for name, passed in self.ready.items()}
        return Shares(_parts(self.forward, num_layers), _parts(self.backward, num_layers), ready)


@dataclass(frozen=True)
class Shares:
    """What parts of a pass belong to whom."""

    forward: list[float]
    """By layer."""
    backward: list[float]
    ready: dict[str, float]
    """How much of backward had passed when a parameter's gradient was there, by name, in that order."""


def typical(traces: list[Trace]) -> Trace:
    """The trace in which every interval is as long as usual.

    A pass that something else has interrupted is too long in one interval, another pass in another. Of passes that do
    not go through the same layers, the one of the usual length.
    """
    first = traces[0]
    if any(trace.course != first.course for trace in traces):
        return sorted(traces, key=lambda trace: sum(_counted(trace.backward)))[len(traces) // 2]
    forward, backward = _medians([each.forward for each in traces]), _medians([each.backward for each in traces])
    return Trace(forward, backward, first.ready)


def _medians(passes: list[list[Interval]]) -> list[Interval]:
    return [(same[0][0], median(seconds for _, seconds in same)) for same in zip(*passes, strict=True)]


def _counted(intervals: list[Interval]) -> list[float]:
    return [seconds if whose != HOOKS else 0.0 for whose, seconds in intervals]


def _parts(intervals: list[Interval], num_layers: int) -> list[float]:
    spent: dict[int, float] = defaultdict(float)
    for whose, seconds in intervals:
        spent[whose] += seconds
    whole_s = sum(_counted(intervals)) or 1.0
    return [spent[number] / whole_s for number in range(num_layers)]
