"""Who of a host's workers is here: leaving, being lost, and meeting, by counters in memory that all share."""

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tutti.errors import NonFiniteLoss

if TYPE_CHECKING:
    from tutti.transports.shared_memory.flags import Flags
    from tutti.transports.shared_memory.transport import SharedMemoryTransport

_log = logging.getLogger("tutti")

_CHECK_SECONDS = 0.2

_HERE, _LEFT, _LOST = 0, 1, 2

Left = Callable[[], tuple[np.ndarray, int] | None]
"""Counters, and what all of them have to come to before a wait is over; None when it is."""


class Slots:
    """Hands out places among counters, in the same order on every rank."""

    def __init__(self) -> None:
        self.used = 16  # Those before are the counters' own.

    def take(self, *shape: int) -> np.ndarray:
        numel = int(np.prod(shape))
        self.used += numel
        return np.arange(self.used - numel, self.used, dtype=np.int64).reshape(shape)


class Gathering:
    """The workers of one host, as each of them sees the others."""

    def __init__(self, transport: "SharedMemoryTransport", slots: Slots) -> None:
        """Take what is needed of `slots`; `open` comes when all have."""
        self._transport = transport
        self._me = transport.rank
        self._gone = slots.take(transport.size)
        self._met, self._resumed = slots.take(transport.size), slots.take(transport.size)
        self._meetings, self._stopped, self._said = slots.take(1), slots.take(1), slots.take(1)
        self._alarm = int(slots.take(1)[0])
        self.clock_of: Callable[[int], int] = lambda worker: 0
        """How far a worker came."""
        self.on_loss: Callable[[int], None] = lambda worker: None
        """Called, perhaps several times, for a worker that is lost."""
        self.progress: Callable[[], int] = lambda: 0
        """A number that changes while others go on."""

    def open(self, flags: "Flags") -> None:
        self.flags = flags
        self._counters = flags.counters

    @property
    def living(self) -> list[int]:
        return np.flatnonzero(self._counters[self._gone] == _HERE).tolist()

    @property
    def is_leader(self) -> bool:
        """Whether no rank before this one is here."""
        return self._me == min(self.living)

    def stop(self) -> None:
        """Have everybody stop."""
        self.flags.publish(int(self._stopped[0]), self._me + 1)

    def check(self, steps: int) -> None:
        """Raise if somebody has asked everybody to stop."""
        if stopped := self.flags.value(int(self._stopped[0])):
            raise NonFiniteLoss(self._me, [stopped - 1], steps)

    def leave(self) -> None:
        """This worker is done."""
        self.flags.publish(int(self._gone[self._me]), _LEFT)

    def meet(self, then: Callable[[int], None]) -> None:
        """When all that are left have come, do `then`, with the meeting's number; go on when all have done it."""
        number = self.flags.value(int(self._meetings[0])) + 1
        self.flags.publish(int(self._met[self._me]), number)
        self.wait(lambda: self._unmet(self._met, number))
        then(number)
        self.flags.publish(int(self._resumed[self._me]), number)
        self.wait(lambda: self._unmet(self._resumed, number))
        self.flags.publish(int(self._meetings[0]), number)

    def first_does(self, number: int, what: Callable[[], None]) -> None:
        """In a meeting: have the first do something, and go on when it is done; if it is lost, have the next do it."""

        def left() -> tuple[np.ndarray, int] | None:
            if self.flags.reached(self._said, number):
                return None
            if self.is_leader:
                what()
                self.flags.publish(int(self._said[0]), number)
                return None
            return self._said, number

        self.wait(left)

    def _unmet(self, counters: np.ndarray, number: int) -> tuple[np.ndarray, int] | None:
        slots = counters[self._counters[self._gone] == _HERE]
        return None if self.flags.reached(slots, number) else (slots, number)

    def wait(self, left: Left, steps: int = 0) -> None:
        """Wait until `left` says that nothing is left to wait for, as long as others go on."""
        patience = self._transport.timeout.total_seconds()
        deadline, seen = time.monotonic() + patience, -1
        while (awaited := left()) is not None:
            if self.flags.wait(*awaited, _CHECK_SECONDS):
                continue
            self.look_around(steps)
            if (progress := self.progress()) != seen:
                deadline, seen = time.monotonic() + patience, progress
            elif time.monotonic() > deadline:
                late = np.flatnonzero(self._counters[awaited[0]] < awaited[1])
                lost = sorted(set(range(self._transport.size)) - set(self.living))
                gone = f"; ranks {', '.join(map(str, lost))} have left" if lost else ""
                raise self._transport.membership.timeout_error(f"other workers ({len(late)} are not as far{gone})")

    def acquire(self, lock: int) -> None:
        """Take a lock, if need be from one who is lost."""
        deadline = time.monotonic() + self._transport.timeout.total_seconds()
        while not self.flags.lock(lock, self._me + 1, _CHECK_SECONDS):
            self.look_around()
            if time.monotonic() > deadline:
                owner = self.flags.value(lock) - 1
                raise self._transport.membership.timeout_error(f"rank {owner} to take a step of the optimiser")

    def release(self, lock: int) -> None:
        self.flags.publish(lock, 0)

    def free(self, lock: int, worker: int) -> bool:
        """Take a lock away from one who is lost; whether it had it."""
        if not self.flags.swap(lock, worker + 1, 0):
            return False
        self.flags.publish(self._alarm, 1)  # Wakes those who wait for it.
        return True

    def look_around(self, steps: int = 0) -> None:
        """Raise if this rank is to stop; say who is lost, once, and go on without."""
        self._transport.check_open()
        self.check(steps)
        for worker, why in self._transport.missing().items():
            if self.flags.swap(int(self._gone[worker]), _HERE, _LOST):
                _log.warning(
                    "rank %d: worker %d left at clock %d, and %d go on: %s",
                    *(self._me, worker, self.clock_of(worker), len(self.living), why),
                )
            if int(self._counters[self._gone[worker]]) == _LOST:
                self.on_loss(worker)
