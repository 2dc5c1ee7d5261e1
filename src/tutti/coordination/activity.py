"""`Activity`: the phase of training that this process is in, its step, and for whom it waits.

How it works
------------
Training writes it and the heartbeat reads it, a few times a second. A write is an assignment or two, so it costs well
under a microsecond and needs no lock: the heartbeat may read values of two neighbouring moments, which does no harm.

A wait is entered (`waiting`) by code that has already waited for a tenth of a second, so a wait that ends at once costs
nothing. There is at most one wait per thread. Waits of background threads are marked: they show for whom an exchange
waits, but the process itself computes meanwhile, unless its training loop waits for that thread.
"""

import resource
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tutti.coordination.frames import ProtocolError

_NEW_WEIGHT = 0.2
"""Weight of the newest duration in what is usual."""

_MANY_FAULTS = 200.0
"""Page faults a second that go to the disk, from which on a process is said to wait for memory."""
_MOST_WAITS, MOST_RANKS = 8, 64
"""Waits that are reported, and ranks of each."""

_LONGEST_TEXT = 1000
"""Characters of a phase or an action that are reported. Names of channels, which a user may choose, are in them."""

_LONGEST_STACK = 16_000
"""Characters of a stack that are reported: its innermost part."""

MEMBERSHIP_ACTION = "come: the run changes its members"
"""What a process waits for others to do that is between two generations of an elastic world."""

IDLE = "outside of a step"
"""The phase of a process whose training loop does something that Tutti does not see."""


@dataclass(eq=False)
class Wait:
    """A wait of one thread for other ranks."""

    ranks: Sequence[int]
    """Ranks of the whole world that are waited for."""
    action: str
    """What they should do."""
    any_of: bool = False
    """Whether one of them is enough."""
    observed: bool = True
    """Whether data that moves restarts it. MPI and Gloo do not show that: such a wait may last while all is well."""
    since: float = field(default_factory=time.monotonic)

    def moved(self) -> None:
        """Data has moved: the wait begins anew."""
        self.since = time.monotonic()


class Activity:
    """The present phase, step and waits of this process."""

    def __init__(self) -> None:
        self.phase = "starting"
        self.step = 0
        """Number of steps that were taken."""
        self._entered = time.monotonic()
        self._stepped_at = 0.0
        self._usual: dict[str, float] = {}
        """Usual seconds in each phase, and of a whole step as "step"."""
        self._faults = 0, 0.0
        """Number of page faults that went to the disk, and when it was read."""
        self._waits: dict[int, Wait] = {}
        """Waits by thread."""
        self._background: set[int] = set()
        """Threads whose waits stop the training loop only while it waits for them."""
        self._awaited: Counter[int] = Counter()
        """How many threads wait for each of those."""

    def enter(self, phase: str) -> None:
        """A phase begins, and with it the one before ends."""
        now = time.monotonic()
        self._learn(self.phase, now - self._entered)
        self.phase, self._entered = phase, now

    def stepped(self) -> None:
        """A step was taken."""
        now = time.monotonic()
        if self._stepped_at:
            self._learn("step", now - self._stepped_at)
        self._stepped_at = now
        self.step += 1

    def _learn(self, name: str, seconds: float) -> None:
        usual = self._usual.get(name)
        self._usual[name] = seconds if usual is None else usual + _NEW_WEIGHT * (seconds - usual)

    def in_background(self) -> None:
        """The calling thread works beside the training loop: its waits do not stop it."""
        self._background.add(threading.get_ident())

    @contextmanager
    def waiting_for_thread(self, thread: int | None) -> Iterator[None]:
        """The calling thread waits for a background thread, whose own waits stop it meanwhile."""
        number = thread or 0
        self._awaited[number] += 1
        try:
            yield
        finally:
            self._awaited[number] -= 1

    @contextmanager
    def waiting(
        self, ranks: Sequence[int], action: str, *, any_of: bool = False, observed: bool = True
    ) -> Iterator[Wait]:
        """The calling thread waits for other ranks to do something.

        Args:
            ranks: ranks of the whole world.
            action: completes "waits for rank 3 to ...".
            any_of: one of the ranks is enough.
            observed: `Wait.moved` is called when data moves. Otherwise ranks in such waits may go on together.
        """
        thread = threading.get_ident()
        before = self._waits.get(thread)
        wait = self._waits[thread] = Wait(ranks, action, any_of, observed)
        try:
            yield wait
        finally:
            if before is None:
                self._waits.pop(thread, None)
            else:
                self._waits[thread] = before

    def status(self) -> dict[str, Any]:
        """What a heartbeat reports, as JSON has it."""
        now, phase = time.monotonic(), self.phase
        return {
            "phase": phase[:_LONGEST_TEXT],
            "phase_s": round(now - self._entered, 3),
            "usual_s": round(self._usual.get(phase, 0.0), 6),
            "step": self.step,
            "step_s": round(self._usual.get("step", 0.0), 6),
            "waits": [
                {
                    "ranks": list(wait.ranks)[:MOST_RANKS],
                    "action": wait.action[:_LONGEST_TEXT],
                    "s": round(now - wait.since, 3),
                    "any_of": wait.any_of,
                    "observed": wait.observed,
                    "background": thread in self._background and not self._awaited[thread],
                }
                for thread, wait in list(self._waits.items())[:_MOST_WAITS]
            ],
            "memory": self._memory_pressure(now),
        }

    def _memory_pressure(self, now: float) -> str:
        """What shows that this process waits for memory: pages that are read back from the disk."""
        num_faults, (before, read_at) = resource.getrusage(resource.RUSAGE_SELF).ru_majflt, self._faults
        self._faults = num_faults, now
        rate = (num_faults - before) / max(now - read_at, 1e-3)
        return f"{rate:.0f} pages a second are read back from the disk" if rate > _MANY_FAULTS else ""


_STATUS: dict[str, tuple[type, ...]] = {
    "phase": (str,),
    "phase_s": (int, float),
    "usual_s": (int, float),
    "step": (int,),
    "step_s": (int, float),
    "waits": (list,),
    "memory": (str,),
}
_WAIT: dict[str, tuple[type, ...]] = {
    "ranks": (list,),
    "action": (str,),
    "s": (int, float),
    "any_of": (bool,),
    "observed": (bool,),
    "background": (bool,),
}


def check_status(status: dict[str, Any]) -> None:
    """Raise `ProtocolError` for a status that no process reports: what it says goes into sums and tables."""
    if not status:
        return  # A member that has nothing to report yet.
    waits = status.get("waits")
    fits = _fits(status, _STATUS) and isinstance(waits, list) and len(waits) <= _MOST_WAITS
    if not fits or not all(_fits(wait, _WAIT) for wait in status["waits"]):
        raise ProtocolError("a status that no process reports")
    for wait in status["waits"]:
        if len(wait["ranks"]) > MOST_RANKS or any(type(rank) is not int for rank in wait["ranks"]):
            raise ProtocolError("a wait for what are no ranks")


def _fits(fields: Any, kinds: dict[str, tuple[type, ...]]) -> bool:
    if not isinstance(fields, dict) or fields.keys() != kinds.keys():
        return False
    texts = (value for value in fields.values() if isinstance(value, str))
    return all(type(fields[name]) in kind for name, kind in kinds.items()) and all(
        len(t) <= _LONGEST_TEXT for t in texts
    )


def main_stack() -> str:
    """The Python stack of this process's main thread, as a traceback shows it; called from another thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame))[-_LONGEST_STACK:] if frame is not None else ""
