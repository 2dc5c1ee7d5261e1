"""The account of a simulated rank's time, the travel time of its messages, and how fast it computes."""

import random

from tutti.cluster import Cluster
from tutti.events import COMPUTE, WAIT, Event, EventLog, Strip

_KEPT_EVENTS = 2000
"""Newest events of a rank that are kept; sums and the strip cover all of them."""


class TimeAccount:
    """Seconds spent computing, communicating and waiting: in all, over the course of time, and event by event."""

    def __init__(self) -> None:
        self.busy_s = self.waiting_s = self.communicating_s = 0.0
        self.events = EventLog(keep=_KEPT_EVENTS)
        self.strip = Strip((COMPUTE, "communicate", WAIT))
        self._computing: Event | None = None
        """The stretch of computing that may still grow: `ComputeClock` adds one piece per gradient."""

    def add_computing(self, start_s: float, stop_s: float) -> None:
        """Add computing from start to stop. Pieces that follow each other become one event."""
        self.busy_s += stop_s - start_s
        last = self._computing
        # Equal to the last bit, since a piece starts at the very number at which the one before it stopped.
        if last is not None and last.stop_s == start_s:
            self._computing = last._replace(stop_s=stop_s)
        else:
            self.flush()
            self._computing = Event(COMPUTE, start_s, stop_s)

    def add_waiting(self, start_s: float, stop_s: float, communicating_s: float) -> None:
        """Add a wait from start to stop, during which messages travelled for `communicating_s`."""
        # Events are kept in the order of time, so the computing before this wait is recorded before it.
        self.flush()
        self.communicating_s += communicating_s
        self.waiting_s += stop_s - start_s - communicating_s
        self.events.record(Event(WAIT, start_s, stop_s))
        # Messages arrive when a wait ends, so the communicating part is drawn as its last part.
        self.strip.add(1, stop_s - communicating_s, stop_s)
        self.strip.add(2, start_s, stop_s - communicating_s)

    def flush(self) -> None:
        """Record the stretch of computing that has ended."""
        if self._computing is not None:
            self.events.record(self._computing)
            self.strip.add(0, self._computing.start_s, self._computing.stop_s)
            self._computing = None


class TravelTime:
    """The time in which at least one message to or from a rank was travelling.

    Overlapping messages count once. One that ends before the end of an earlier one is taken to lie within it, so two
    numbers suffice. The last message may arrive in the future.
    """

    __slots__ = ("total_s", "until_s")

    def __init__(self) -> None:
        self.total_s = 0.0
        """Length of the union of all intervals added so far."""
        self.until_s = 0.0
        """End of the last of them."""

    def add(self, start_s: float, stop_s: float) -> None:
        """Add a message that travels from start to stop. `Mailbox.send_direct` has the same lines inline."""
        until_s = self.until_s
        if stop_s > until_s:
            self.total_s += stop_s - (start_s if start_s > until_s else until_s)
            self.until_s = stop_s

    def before(self, time_s: float) -> float:
        """Seconds of travel up to `time_s`, which is not long before the end of the last message."""
        return self.total_s - max(0.0, self.until_s - time_s)


class ComputeSpeed:
    """The computing speed of a rank, and the random pauses that interrupt it."""

    def __init__(self, cluster: Cluster, number: int, speed: float) -> None:
        self._slowness = 1 / speed
        self._pauses = cluster.pauses
        # Of its own, and not shared: a rank's pauses must not depend on the order in which ranks run.
        self._rng = random.Random(f"{cluster.seed} {number} pauses")
        self._next_pause_s = self._draw(cluster.pauses.every_s) if cluster.pauses else float("inf")

    def finish_s(self, clock_s: float, seconds: float) -> float:
        """Return when a computation ends that starts at `clock_s` and takes `seconds` at speed 1."""
        stop_s = clock_s + seconds * self._slowness
        # A pause postpones the end, so that further pauses may fall into the computation.
        while stop_s > self._next_pause_s:
            assert self._pauses is not None
            length_s = self._draw(self._pauses.length_s)
            # The part of a pause that passed while this rank waited for others costs nothing.
            stop_s += max(0.0, min(length_s, self._next_pause_s + length_s - clock_s))
            # Counted from the end of this pause, whether or not it cost the rank anything.
            self._next_pause_s += length_s + self._draw(self._pauses.every_s)
        return stop_s

    def _draw(self, mean_s: float) -> float:
        return self._rng.expovariate(1 / mean_s) if mean_s > 0 else 0.0
