"""`Restarts`: when workers are started in place of lost ones.

A slot waits before its next worker is started: `FIRST_S` after its first loss, twice as long after each further one,
up to `LONGEST_S`. A worker that ran for `STABLE_S` makes the next loss count as the first. The number of restarts of a
whole run is limited.
"""

import time
from collections.abc import Callable

FIRST_S, LONGEST_S = 0.5, 30.0
STABLE_S = 60.0


class Restarts:
    """Slots that wait for their next worker, and how many restarts are left."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Allow `limit` restarts, at times of `clock`."""
        self.left = limit
        self._clock = clock
        self._delays: dict[int, float] = {}
        """How long each slot waited the last time."""
        self._due: dict[int, float] = {}
        """When each slot that waits gets its next worker."""

    @property
    def waiting(self) -> set[int]:
        """The slots that wait for a worker."""
        return set(self._due)

    def lost(self, slot: int, alive_s: float) -> float | None:
        """Plan a worker in place of one that ran for `alive_s`; return after how long it starts, or None for never."""
        if not self.left:
            return None
        self.left -= 1
        before = self._delays.get(slot)
        delay_s = FIRST_S if before is None or alive_s >= STABLE_S else min(2 * before, LONGEST_S)
        self._delays[slot], self._due[slot] = delay_s, self._clock() + delay_s
        return delay_s

    def due(self) -> list[int]:
        """Return the slots that get a worker now, and forget that they waited."""
        slots = [slot for slot, due_at in self._due.items() if due_at <= self._clock()]
        for slot in slots:
            del self._due[slot]
        return slots

    def cancel(self) -> None:
        """Start no more workers."""
        self.left = 0
        self._due.clear()
