"""What a simulated rank spends its time on."""

import random

from tutti.cluster import Cluster
from tutti.events import COMPUTE, WAIT, Event, EventLog, Strip

_KEPT_EVENTS = 2000


class TimeAccount:
    """Computing, communicating and waiting: in all, over the course of time, and event by event."""

    def __init__(self) -> None:
        self.busy_s = self.waiting_s = self.communicating_s = 0.0
        self.events = EventLog(keep=_KEPT_EVENTS)
        self.strip = Strip((COMPUTE, "communicate", WAIT))
        self._computed: Event | None = None

    def computed(self, start_s: float, stop_s: float) -> None:
        self.busy_s += stop_s - start_s
        last = self._computed
        if last is not None and last.stop_s == start_s:
            self._computed = last._replace(stop_s=stop_s)  # One stretch, however many pieces.
        else:
            self.flush()
            self._computed = Event(COMPUTE, start_s, stop_s)

    def waited(self, start_s: float, stop_s: float, communicating_s: float) -> None:
        """From start to stop, and as long as messages travelled meanwhile."""
        self.flush()
        self.communicating_s += communicating_s
        self.waiting_s += stop_s - start_s - communicating_s
        self.events.record(Event(WAIT, start_s, stop_s))
        self.strip.add(1, stop_s - communicating_s, stop_s)
        self.strip.add(2, start_s, stop_s - communicating_s)

    def flush(self) -> None:
        """Write down the stretch of computing that has ended."""
        if self._computed is not None:
            self.events.record(self._computed)
            self.strip.add(0, self._computed.start_s, self._computed.stop_s)
            self._computed = None


class ComputeSpeed:
    """How long a rank takes to compute: its speed, and the pauses that come over it."""

    def __init__(self, cluster: Cluster, number: int, speed: float) -> None:
        self._slowness = 1 / speed
        self._pauses = cluster.pauses
        self._rng = random.Random(f"{cluster.seed} {number} pauses")
        self._next_pause_s = self._draw(cluster.pauses.every_s) if cluster.pauses else float("inf")

    def until(self, clock_s: float, seconds: float) -> float:
        """When a rank is done that starts at `clock_s` on what takes `seconds` at speed 1."""
        stop_s = clock_s + seconds * self._slowness
        while stop_s > self._next_pause_s:
            assert self._pauses is not None
            length_s = self._draw(self._pauses.length_s)
            # What of it went by while this rank waited for others costs nothing.
            stop_s += max(0.0, min(length_s, self._next_pause_s + length_s - clock_s))
            self._next_pause_s += length_s + self._draw(self._pauses.every_s)
        return stop_s

    def _draw(self, mean_s: float) -> float:
        return self._rng.expovariate(1 / mean_s) if mean_s > 0 else 0.0
