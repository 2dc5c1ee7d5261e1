"""Events of training with start, end and bytes: recorded as it runs, read by metrics and reports."""

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

EXCHANGE = "exchange"
"""Waiting for other ranks: the part of communication that computation did not hide."""

PULL = "pull"
"""Waiting for parameters, by parameter servers."""

READ = "read"
APPLY = "apply"
"""The version of a shard that an update was computed from; the updates that made a version. Neither takes time."""

COMPUTE = "compute"
WAIT = "wait"
"""COMPUTE and WAIT: a simulated rank computes, or waits for others."""


class Event(NamedTuple):
    """An event that lasted from `start_s` to `stop_s` on this rank's clock."""

    kind: str
    start_s: float
    stop_s: float
    num_bytes: int = 0
    """Bytes that this rank sent meanwhile."""
    about: tuple[int, ...] = ()
    """READ: shard, clock, version. APPLY: shard, version, worker, clock."""


class Total:
    """Sums over all events of one kind."""

    __slots__ = ("count", "num_bytes", "seconds")

    def __init__(self) -> None:
        self.count, self.num_bytes, self.seconds = 0, 0, 0.0


class EventLog:
    """The newest events, and totals over all of them."""

    def __init__(self, keep: int = 10_000) -> None:
        self._events: deque[Event] = deque(maxlen=keep)
        self.totals: defaultdict[str, Total] = defaultdict(Total)

    def record(self, event: Event) -> None:
        """Add an event to the log and to the totals of its kind."""
        self._events.append(event)
        total = self.totals[event.kind]
        total.count += 1
        total.num_bytes += event.num_bytes
        total.seconds += event.stop_s - event.start_s

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)


class Strip:
    """The division of time between a few kinds of use, in a fixed number of bins that widen as time goes on."""

    def __init__(self, kinds: tuple[str, ...], num_bins: int = 256) -> None:
        self.kinds = kinds
        self.seconds = np.zeros((len(kinds), num_bins))
        """Seconds of each kind (row) in each bin (column)."""
        self.bin_s = 1e-6
        """Width of a bin."""

    def add(self, kind: int, start_s: float, stop_s: float) -> None:
        """Add the time from start to stop to one kind, given by its index."""
        if stop_s <= start_s:
            return
        row = self.seconds[kind]
        while stop_s > self.bin_s * len(row):
            # The time does not fit: add up pairs of bins in the first half, clear the second, and double the width.
            self.seconds[:, : len(row) // 2] = self.seconds.reshape(len(self.kinds), -1, 2).sum(2)
            self.seconds[:, len(row) // 2 :] = 0
            self.bin_s *= 2
        # The end of the last bin belongs to it: hence the minimum.
        first, last = int(start_s / self.bin_s), min(int(stop_s / self.bin_s), len(row) - 1)
        if first == last:
            row[first] += stop_s - start_s
            return
        # A part of the first bin, whole bins between, a part of the last.
        row[first] += (first + 1) * self.bin_s - start_s
        row[first + 1 : last] += self.bin_s
        row[last] += stop_s - last * self.bin_s
