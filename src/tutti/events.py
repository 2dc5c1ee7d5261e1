"""What happened, when, and how many bytes it moved: written as training goes, read by reports."""

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import NamedTuple

EXCHANGE = "exchange"
"""Waiting for other ranks: the part of communication that computation did not hide."""


class Event(NamedTuple):
    """One thing that took from `start_s` to `stop_s` on this rank's clock."""

    kind: str
    start_s: float
    stop_s: float
    num_bytes: int = 0


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
        self._events.append(event)
        total = self.totals[event.kind]
        total.count += 1
        total.num_bytes += event.num_bytes
        total.seconds += event.stop_s - event.start_s

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)
