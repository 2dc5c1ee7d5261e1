"""What happened, when, and how many bytes it moved: written as training goes, read by reports."""

from collections import Counter, deque
from collections.abc import Iterator
from typing import NamedTuple

EXCHANGE = "exchange"
"""Waiting for other ranks: the part of communication that computation did not hide."""

STEP = "step"


class Event(NamedTuple):
    """One thing that took from `start_s` to `stop_s` on this rank's clock."""

    kind: str
    start_s: float
    stop_s: float
    num_bytes: int = 0


class EventLog:
    """The newest events, and totals over all of them."""

    def __init__(self, keep: int = 10_000) -> None:
        self._events: deque[Event] = deque(maxlen=keep)
        self.count: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}
        self.num_bytes: Counter[str] = Counter()

    def record(self, event: Event) -> None:
        self._events.append(event)
        self.count[event.kind] += 1
        self.seconds[event.kind] = self.seconds.get(event.kind, 0.0) + event.stop_s - event.start_s
        self.num_bytes[event.kind] += event.num_bytes

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)
