"""Virtual time: what happens next, and the threads of simulated ranks, of which exactly one runs."""

import threading
import time
from collections.abc import Callable
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from tutti.simulation.randomness import Randomness

if TYPE_CHECKING:
    from tutti.simulation.rank import Rank

Action = Callable[[], None]

_PULSE_S, _PULSE_EVERY = 0.1, 64
_GRACE_S = 10.0
"""How long ranks' threads get to come to their next waits when the simulation is over."""
_LOOK_S = 0.01


class Engine:
    """The agenda of a simulation, and whose turn it is.

    Its loop runs in the thread that asked for the simulation. What is due at one moment is done in the order in which
    it was asked for. A rank's thread runs while the loop waits for it, until it has to wait for something itself.
    """

    def __init__(self, pulse: Callable[[float], None] | None = None) -> None:
        self.now = 0.0
        self.stopping = False
        self._times: list[float] = []
        self._agenda: dict[float, Action | list[Action]] = {}
        self._alarms: list[tuple[float, int, Rank]] = []
        self._lookers: list[Rank] = []
        self._pulse = pulse
        self._turn = threading.Lock()
        self._turn.acquire()
        self._outside = Randomness()
        self._last: Rank | None = None

    def at(self, time_s: float, action: Action) -> None:
        """Do `action` at that time, which has not passed yet."""
        agenda = self._agenda
        due = agenda.get(time_s)
        if due is None:
            agenda[time_s] = action  # Mostly it is the only one.
            heappush(self._times, time_s)
        elif due.__class__ is list:
            due.append(action)
        else:
            agenda[time_s] = [due, action]  # type: ignore[list-item]

    def alarm(self, time_s: float, rank: "Rank") -> None:
        """Look at that time whether the rank has waited too long. Alone it keeps nothing going."""
        heappush(self._alarms, (time_s, rank.number, rank))

    def look_later(self, rank: "Rank") -> None:
        """Resume a rank that asks again and again when all that is due now is done and the next thing is due.

        Where nothing is, it is resumed now.
        """
        self._lookers.append(rank)

    def run(self, ranks: list["Rank"]) -> None:
        """Do what is due, to the last message. Raises what `Rank.stuck` says if ranks are left then."""
        times, agenda, alarms = self._times, self._agenda, self._alarms
        looked_s, count = time.monotonic(), 0
        while times:
            if alarms and alarms[0][0] < times[0]:
                self.now, _, rank = heappop(alarms)
                rank.ring()
                continue
            self.now = heappop(times)
            due = agenda.pop(self.now)
            if due.__class__ is list:
                for action in due:
                    action()
            else:
                due()  # type: ignore[operator]
            if self._lookers and not (times and times[0] == self.now):
                self._let_look()
            count += 1
            if count % _PULSE_EVERY == 0 and self._pulse is not None and time.monotonic() - looked_s > _PULSE_S:
                looked_s = time.monotonic()
                self._pulse(self.now)
        if not all(rank.ended for rank in ranks):
            raise ranks[0].stuck(ranks)

    def _let_look(self) -> None:
        lookers, self._lookers = self._lookers, []
        next_s = self._times[0] if self._times else None
        for rank in lookers:
            self.at(rank.looks_again_s(next_s), rank.resume)

    def give_turn(self, rank: "Rank") -> None:
        """Let a rank's thread run until it waits or ends. Its random numbers are its own."""
        if self._last is not rank:
            (self._last.randomness if self._last is not None else self._outside).keep()
            rank.randomness.bring_back()
            self._last = rank
        rank.paused = False
        rank.turn.release()
        self._turn.acquire()

    def take_turn(self) -> None:
        """Called by a rank's thread, which waits or has ended: let the loop go on."""
        if not self.stopping:  # From then on there is no loop, and nobody waits for this.
            self._turn.release()

    def stop(self, ranks: list["Rank"]) -> None:
        """End the threads of all ranks, wherever they are, and give the caller's random numbers back.

        The loop may have been interrupted anywhere, even while a rank's thread runs.
        """
        self.stopping = True
        deadline = time.monotonic() + _GRACE_S
        for rank in ranks:
            while rank.alive and time.monotonic() < deadline:
                if rank.paused:  # It wakes up once, and never waits for its turn again.
                    rank.paused = False
                    rank.turn.release()
                rank.join(_LOOK_S)
            if not rank.alive:
                rank.join()
        if self._last is not None:
            self._outside.bring_back()
