"""The event loop of a simulation: a queue of events in virtual time, and ranks' threads, of which one runs at a time.

How it works
------------
`Engine.run` is called by the thread that asked for the simulation. It takes the earliest time from a heap, sets `now`
to it and calls the actions scheduled for that time, in the order in which they were scheduled. Actions move messages,
complete work, and resume ranks.

A rank runs user code in a thread of its own. Two kinds of locks pass the control to and fro, and exactly one of all
these threads is ever runnable:

- `run_rank(rank)` (loop's thread) releases the rank's `turn` lock and then blocks on the engine's own `_turn`.
- `return_turn()` (rank's thread) releases `_turn`. It is called when the rank waits for something, or has ended.

So no state of the simulation needs a lock: the thread that runs may use all of it. The order of all actions depends
on virtual times and on the order of scheduling only, never on the operating system, which makes runs repeatable.

A rank computes ahead: its clock may be later than `now`, but nothing that it does becomes visible before its clock's
time, because it is scheduled there. A rank that blocks is resumed by an action on the queue: the end of its work, or
an alarm. Alarms (deadlines) are in a heap of their own, because a deadline alone must not keep a simulation going:
when the queue is empty and ranks are left, no deadline would be met by anybody, and that is a deadlock.

Ranks that poll (`work.done()` in a loop) would never let virtual time pass. The second poll at one moment suspends
the rank (`poll_later`) until all that is due at this moment is done; it then continues at the time of the next event.

`stop` ends all threads, also after an exception in the loop: `stopping` makes every wait of a rank raise `Stopped`.
From then on nobody waits for `_turn`, and the threads run to their ends concurrently.
"""

import threading
import time
from collections.abc import Callable
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from tutti.simulation.deadlock import deadlock_error
from tutti.simulation.randomness import Randomness

if TYPE_CHECKING:
    from tutti.simulation.rank import Rank

Action = Callable[[], None]

_PROGRESS_S, _PROGRESS_EVERY = 0.1, 64
"""Least wall time between two calls of `on_progress`, and how many events pass between two looks at the wall clock."""

_GRACE_S = 10.0
"""Wall time that threads of ranks get to reach their next wait when the simulation is over."""

_JOIN_S = 0.01
"""Wall time between two looks at a thread that is to end."""


class Engine:
    """The event queue of a simulation, and the control over which thread runs."""

    def __init__(self, on_progress: Callable[[float], None] | None = None) -> None:
        self.now = 0.0
        """Virtual time of the event that is being handled, in seconds."""
        self.stopping = False
        """Whether the simulation is over, and threads of ranks are being ended."""
        self._times: list[float] = []
        """A heap of the times for which anything is scheduled, each of them once."""
        self._actions: dict[float, Action | list[Action]] = {}
        """The actions of each of these times: one, or a list in the order of scheduling."""
        self._alarms: list[tuple[float, int, Action]] = []
        """A heap of deadlines. The number decides between equal times, so that actions are never compared."""
        self._polling_ranks: list[Rank] = []
        """Ranks that poll, and continue once all that is due now is done."""
        self._on_progress = on_progress
        self._turn = threading.Lock()
        self._turn.acquire(blocking=False)
        self._callers_randomness = Randomness()
        self._last: Rank | None = None
        """The rank whose random generators are the global ones now; None before any has run."""

    def schedule(self, time_s: float, action: Action) -> None:
        """Call `action` at that virtual time, which must not have passed."""
        actions = self._actions
        due = actions.get(time_s)
        if due is None:
            actions[time_s] = action  # Most moments have one action: no list is made for it.
            heappush(self._times, time_s)
        elif due.__class__ is list:
            due.append(action)
        else:
            actions[time_s] = [due, action]  # type: ignore[list-item]

    def set_alarm(self, time_s: float, number: int, action: Action) -> None:
        """Call `action` at that time, if anything else is still scheduled at or after it.

        Args:
            number: of a rank, or a negative one. There is one alarm at most under each number.
        """
        heappush(self._alarms, (time_s, number, action))

    def poll_later(self, rank: "Rank") -> None:
        """Resume a polling rank when all that is due now is done, at the time of the next event.

        Where nothing else is scheduled, it is resumed now.
        """
        self._polling_ranks.append(rank)

    def run(self, ranks: list["Rank"]) -> None:
        """Handle events until none is left. Raises `Deadlock` if a rank has not ended by then."""
        times, actions, alarms = self._times, self._actions, self._alarms
        reported_s, count = time.monotonic(), 0
        while times:
            # Strictly before: work that ends exactly at its deadline is in time.
            if alarms and alarms[0][0] < times[0]:
                self.now, _, alarm = heappop(alarms)
                alarm()
                continue
            self.now = heappop(times)
            # Popped first: what these actions schedule for this very moment becomes a new entry, which is handled next.
            due = actions.pop(self.now)
            if due.__class__ is list:
                for action in due:
                    action()
            else:
                due()  # type: ignore[operator]
            # Not before actions that were scheduled for this very moment meanwhile.
            if self._polling_ranks and not (times and times[0] == self.now):
                self._schedule_polls()
            count += 1
            if (
                count % _PROGRESS_EVERY == 0
                and self._on_progress is not None
                and time.monotonic() - reported_s > _PROGRESS_S
            ):
                reported_s = time.monotonic()
                self._on_progress(self.now)
        if not all(rank.thread.ended for rank in ranks):
            raise deadlock_error(ranks)

    def _schedule_polls(self) -> None:
        ranks, self._polling_ranks = self._polling_ranks, []
        next_s = self._times[0] if self._times else None
        for rank in ranks:
            self.schedule(rank.waiter.next_poll_s(next_s), rank.resume)

    def run_rank(self, rank: "Rank") -> None:
        """Let a rank's thread run until it waits or ends. It uses random generators of its own."""
        if self._last is not rank:
            # Generator states are switched only when another rank runs, because that is slow.
            (self._last.randomness if self._last is not None else self._callers_randomness).save()
            rank.randomness.restore()
            self._last = rank
        # Before the release: an interrupt between the two lines must not let `stop` release the lock twice.
        rank.thread.paused = False
        rank.thread.turn.release()
        # Until the rank calls `return_turn`, by waiting or ending.
        # Ended by the rank's thread, in `return_turn`.
        self._turn.acquire()

    def return_turn(self) -> None:
        """Let the loop continue. Called by the thread of a rank that waits or has ended."""
        if not self.stopping:  # From then on there is no loop, and nobody waits for this lock.
            self._turn.release()

    def stop(self, ranks: list["Rank"]) -> None:
        """End the threads of all ranks, wherever they are, and give the caller's random generators back.

        The loop may have been interrupted anywhere, even while a rank's thread runs (by Ctrl-C, for example). A thread
        that does not come to a wait within the grace period is left to itself; it is a daemon.
        """
        # First of all: a thread that is woken below must find it set.
        self.stopping = True
        deadline = time.monotonic() + _GRACE_S
        for thread in (rank.thread for rank in ranks):
            while thread.alive and time.monotonic() < deadline:
                if thread.paused:  # It is woken once, sees `stopping`, and never waits for its turn again.
                    thread.paused = False
                    thread.turn.release()
                thread.join(_JOIN_S)
            # It has passed its last line: joining it takes no time, and leaves no thread behind.
            if not thread.alive:
                # Ended by the thread's last line, which it has passed.
                thread.join()
        if self._last is not None:
            self._callers_randomness.restore()
