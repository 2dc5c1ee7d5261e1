"""`ChaosRunner`: carries out the failures of `tutti run --chaos`, in the loop of the supervisor.

How it works. Every clause has a time when it is due next; what lasts (a stopped worker, a host that is cut off) has a
time when it ends. `act` is called all the time, and does what is due. The intervals of `every` are drawn between 0.8
and 1.2 times the given one, and `any` is drawn among the workers that run, both from the seed. Each act prints a line.
Nothing is waited for. `close` ends what still lasts.
"""

import heapq
import random
import signal
import time
from collections.abc import Callable
from itertools import count
from typing import Protocol

from tutti.launch.chaos import Chaos, ChaosRule

_JITTER = 0.2


class ChaosTargets(Protocol):
    """The workers and hosts of a run, as chaos can reach them."""

    def slots(self) -> list[int]:
        """Places in which a worker runs."""
        ...

    def can_end(self, slot: int, *, leaves: bool) -> bool:
        """Whether a worker may be lost, or leave, without ending the run."""
        ...

    def signal(self, slot: int, sign: signal.Signals) -> None:
        """Send a signal to the worker in a place, and for SIGKILL to all that it has started."""
        ...

    def add(self) -> str:
        """Start a worker more; return what came of it."""
        ...

    def leave(self, slot: int) -> None:
        """Ask the worker in a place to leave."""
        ...

    def link(self, host: int, *, up: bool) -> None:
        """Put the link of a lab's host up or down."""
        ...


class ChaosRunner:
    """Causes failures, from `start` on."""

    def __init__(
        self,
        chaos: Chaos,
        targets: ChaosTargets,
        show: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Cause the failures of `chaos` on `targets`, and `show` a line for each."""
        self._chaos, self._targets, self._show, self._clock = chaos, targets, show, clock
        self._random = random.Random(chaos.seed)
        self._due: list[tuple[float, int, Callable[[float], None]]] = []
        """What to do when, the earliest first; the number in the middle keeps the order of what is due together."""
        self._numbers = count()
        self._endings: list[Callable[[], None]] = []
        """What still lasts, and how to end it."""
        self.has_started = False

    def start(self) -> None:
        """All workers train: times count from now."""
        self.has_started, now = True, self._clock()
        for rule in self._chaos.rules:
            after_s = (rule.at_s or 0.0) if rule.every_s is None else self._interval(rule.every_s)
            self._plan(now + after_s, rule)

    @property
    def next_due(self) -> float | None:
        """When there is something to do next, by the clock; None for never."""
        return self._due[0][0] if self._due else None

    def act(self) -> None:
        """Do what is due."""
        while self._due and self._due[0][0] <= self._clock():
            due_at, _, act = heapq.heappop(self._due)
            act(due_at)

    def close(self) -> None:
        """End what still lasts."""
        while self._endings:
            self._endings.pop()()

    def _interval(self, every_s: float) -> float:
        return every_s * self._random.uniform(1 - _JITTER, 1 + _JITTER)

    def _plan(self, due_at: float, rule: ChaosRule) -> None:
        def act(now: float) -> None:
            self._do(rule, now)
            if rule.every_s is not None:
                self._plan(now + self._interval(rule.every_s), rule)

        heapq.heappush(self._due, (due_at, next(self._numbers), act))

    def _do(self, rule: ChaosRule, now: float) -> None:
        if rule.action == "join":
            self._show(f"chaos: join: {self._targets.add()}")
        elif rule.action == "cut":
            self._cut(rule, now)
        else:
            self._do_to_worker(rule, now)

    def _do_to_worker(self, rule: ChaosRule, now: float) -> None:
        there = self._targets.slots()
        slot = self._random.choice(there) if rule.target is None and there else rule.target
        if slot not in there:
            self._show(f"chaos: {rule.text}: no such worker runs now")
            return
        assert slot is not None
        if rule.action in ("kill", "leave") and not self._targets.can_end(slot, leaves=rule.action == "leave"):
            self._show(f"chaos: {rule.text}: left out, because it is the last worker")
            return
        self._show(f"chaos: {rule.action} the worker in place {slot}" + _for(rule))
        if rule.action == "kill":
            self._targets.signal(slot, signal.SIGKILL)
        elif rule.action == "leave":
            self._targets.leave(slot)
        else:
            self._targets.signal(slot, signal.SIGSTOP)
            self._end_later(rule, now, lambda: self._targets.signal(slot, signal.SIGCONT))

    def _cut(self, rule: ChaosRule, now: float) -> None:
        host = rule.target
        assert host is not None
        self._show(f"chaos: cut host {host}" + _for(rule))
        self._targets.link(host, up=False)
        self._end_later(rule, now, lambda: self._targets.link(host, up=True))

    def _end_later(self, rule: ChaosRule, now: float, end: Callable[[], None]) -> None:
        assert rule.lasts_s is not None
        self._endings.append(end)

        def act(_: float) -> None:
            if end in self._endings:
                self._endings.remove(end)
                end()

        heapq.heappush(self._due, (now + rule.lasts_s, next(self._numbers), act))


def _for(rule: ChaosRule) -> str:
    return "" if rule.lasts_s is None else f" for {rule.lasts_s:g} s"
