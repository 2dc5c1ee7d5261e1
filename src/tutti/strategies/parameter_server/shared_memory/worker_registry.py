"""Registry of a host's workers in shared memory: who is alive, barriers, locks, stops.

How it works
------------
Every worker has a status counter: ALIVE, LEFT or LOST. A worker sets its own to LEFT when it finishes. When a wait has
lasted for `_CHECK_SECONDS`, the waiting worker asks the transport who is missing and sets that worker's status from
ALIVE to LOST by compare-and-swap: exactly one worker logs the loss, and every worker then calls `on_loss`, which may
therefore run several times for one loss, on several ranks.

A barrier has a number, one more than that of the last one. (1) Each worker publishes the number as `entered`, and waits
until all living workers have. (2) It runs its action, publishes the number as `left_barrier`, and waits again. (3) It
publishes the number as the last barrier's. Both waits re-read the statuses every time they check, so they end when the
last living worker arrives and also when the last missing worker is lost.

A lock is a counter that holds the owner's rank + 1, or 0. `acquire` waits for 0. If the owner is lost, `on_loss`
repairs what the lock protects and frees it.

Waits have the transport's timeout as deadline, counted from the last change of `progress`: a worker waits on as long
as the others advance.
"""

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tutti.errors import ConfigError, NonFiniteLoss
from tutti.strategies.parameter_server.shared_memory.counters import CounterLayout

if TYPE_CHECKING:
    from tutti.transports.shared_memory.flags import Flags
    from tutti.transports.shared_memory.transport import SharedMemoryTransport

_log = logging.getLogger("tutti")

_CHECK_SECONDS = 0.2
"""How long a wait sleeps before it checks whether a worker is lost."""

_ALIVE, _LEFT, _LOST = 0, 1, 2

STATE, CONSENSUS, FINISH = "job.state_dict() or load_state_dict()", "job.consensus()", "job.finish()"

_CALLS = (STATE, CONSENSUS, FINISH)
"""The calls of a job in which workers enter barriers."""

Awaited = tuple[np.ndarray, int]
"""Indices of counters, and the value that all of them must reach."""


class RegistryCounters:
    """Indices of the registry's counters. They are allocated before the memory is mapped, whose size they decide."""

    def __init__(self, layout: CounterLayout, num_workers: int) -> None:
        self.status = layout.allocate(num_workers)
        """[worker]: ALIVE, LEFT or LOST."""
        self.entered = layout.allocate(num_workers)
        """[worker]: number of the last barrier that the worker has entered."""
        self.call = layout.allocate(num_workers)
        """[worker]: the call in which it has entered that barrier, an index of `_CALLS`."""
        self.left_barrier = layout.allocate(num_workers)
        """[worker]: number of the last barrier whose action the worker has run."""
        self.last_barrier = int(layout.allocate(1)[0])
        """Number of the last barrier that all workers have left."""
        self.stopped_by = int(layout.allocate(1)[0])
        """1 + rank of the worker that asked all workers to stop."""
        self.leader_done = layout.allocate(1)
        """[1]: number of the last barrier in which the leader has done its action."""
        self.lock_freed = int(layout.allocate(1)[0])
        """Published to wake those who wait for a lock; its value means nothing."""


class WorkerRegistry:
    """The workers of one host, as each of them sees the others."""

    def __init__(
        self,
        transport: "SharedMemoryTransport",
        counters: RegistryCounters,
        flags: "Flags",
        clock: Callable[[int], int],
        progress: Callable[[], int],
        on_loss: Callable[[int], None],
    ) -> None:
        """Use the counters of `flags`, in which every worker is alive at first.

        Args:
            transport: says which workers are missing.
            counters: where the registry's counters are in `flags`.
            flags: the shared counters.
            clock: returns the clock of a worker, for the log.
            progress: returns a number that changes while workers make progress.
            on_loss: called for a lost worker, perhaps several times.
        """
        self._transport = transport
        self._rank = transport.rank
        self._indices = counters
        self.flags = flags
        self._counters = flags.counters
        self._clock, self._progress, self._on_loss = clock, progress, on_loss

    @property
    def alive(self) -> list[int]:
        """Ranks of the workers that have not left and are not lost."""
        # A plain read: a status that changes now is seen by the next check.
        return np.flatnonzero(self._counters[self._indices.status] == _ALIVE).tolist()

    @property
    def is_leader(self) -> bool:
        """Whether no living worker has a lower rank."""
        return self._rank == min(self.alive)

    def leave(self) -> None:
        """Leave for good: no worker waits for this one any more."""
        self.flags.publish(int(self._indices.status[self._rank]), _LEFT)

    # Stops

    def request_stop(self) -> None:
        """Ask all workers to stop."""
        # Of several workers that stop at once the last one is named: one is as true as the other.
        self.flags.publish(self._indices.stopped_by, self._rank + 1)

    def check_stop(self, steps: int) -> None:
        """Raise `NonFiniteLoss` if a worker has asked all workers to stop; `steps` is for the message."""
        if stopped_by := self.flags.value(self._indices.stopped_by):
            raise NonFiniteLoss(self._world_rank(self._rank), [self._world_rank(stopped_by - 1)], steps)

    # Barriers

    def barrier(self, action: Callable[[int], None], call: str = STATE) -> None:
        """Wait for all living workers; run `action` with the barrier's number; go on when all have run theirs.

        Raises `ConfigError` on all of them if they are not all in the same `call`.
        """
        # The same on all ranks: no barrier can complete, and be counted, before this rank has entered it.
        number = self.flags.value(self._indices.last_barrier) + 1
        # Before `entered`, whose publish releases it.
        self._counters[self._indices.call[self._rank]] = _CALLS.index(call)
        self.flags.publish(int(self._indices.entered[self._rank]), number)
        self.wait(lambda: self._missing(self._indices.entered, number))
        self._refuse_different_calls(number)
        action(number)
        self.flags.publish(int(self._indices.left_barrier[self._rank]), number)
        self.wait(lambda: self._missing(self._indices.left_barrier, number))
        # Every rank publishes the same number, so the order in which they do does not matter.
        self.flags.publish(self._indices.last_barrier, number)

    def _refuse_different_calls(self, number: int) -> None:
        # Of all that have entered it, also of those that have ended since, with this very error.
        entered = [worker for worker, last in enumerate(self._counters[self._indices.entered]) if last == number]
        calls = {worker: _CALLS[int(self._counters[self._indices.call[worker]])] for worker in entered}
        if len(set(calls.values())) > 1:
            where = ", ".join(f"rank {self._world_rank(worker)} is in {call}" for worker, call in calls.items())
            raise ConfigError(f"rank {self._world_rank(self._rank)}: {where}. Every rank must enter the same.")

    def run_on_leader(self, barrier_number: int, action: Callable[[], None]) -> None:
        """Within a barrier: run `action` on the leader, or on the next if that is lost, and wait until it is done."""

        def remaining() -> Awaited | None:
            if self.flags.reached(self._indices.leader_done, barrier_number):
                return None
            if self.is_leader:
                # A leader lost before the publish leaves it to the next one, which runs its own `action` from the
                # start.
                action()
                self.flags.publish(int(self._indices.leader_done[0]), barrier_number)
                return None
            return self._indices.leader_done, barrier_number

        self.wait(remaining)

    def _missing(self, counters: np.ndarray, number: int) -> Awaited | None:
        """Return the counters of the living workers if one of them is below `number`, else None."""
        # Statuses are read anew in every check, so the wait also ends when the last missing worker is lost.
        alive = counters[self._counters[self._indices.status] == _ALIVE]
        return None if self.flags.reached(alive, number) else (alive, number)

    # Waits and locks

    def wait(self, remaining: Callable[[], Awaited | None], steps: int = 0) -> None:
        """Wait until `remaining` returns None, and handle losses and stops meanwhile.

        Args:
            remaining: returns what to wait for next; called again whenever that is reached, and after every check.
            steps: the number of steps taken, for the message of `NonFiniteLoss`.
        """
        # The usual case first, which is not reported to others.
        while (awaited := remaining()) is not None:
            if not self.flags.wait(*awaited, _CHECK_SECONDS):
                self._wait_long(remaining, steps)

    def _wait_long(self, remaining: Callable[[], Awaited | None], steps: int) -> None:
        """Wait until `remaining` returns None, and report it to others."""
        timeout_s = self._transport.timeout.total_seconds()
        # -1 is no progress that can be: the first check starts the deadline anew.
        deadline, last_progress = time.monotonic() + timeout_s, -1
        with self._transport.activity.waiting((), "push its update") as wait:
            while (awaited := remaining()) is not None:
                wait.ranks = self._late(*awaited)
                # In short waits, so that a lost worker or a stop is noticed after one of them.
                if self.flags.wait(*awaited, _CHECK_SECONDS):
                    continue
                self.check_workers(steps)
                if (progress := self._progress()) != last_progress:
                    deadline, last_progress = time.monotonic() + timeout_s, progress
                    wait.moved()
                elif time.monotonic() > deadline:
                    names = ", ".join(map(str, wait.ranks))
                    raise self._transport.membership.timeout_error(f"rank {names} to push an update")

    def _late(self, counters: np.ndarray, number: int) -> list[int]:
        """World ranks of the workers that keep these counters below `number`."""
        low = counters[self._counters[counters] < number]
        others = [worker for worker in self.alive if worker != self._rank]
        # Counters of the barrier have an owner each. Those of shards wait for the workers that have pushed the least.
        own = [self._indices.entered, self._indices.left_barrier]
        late = [worker for worker in others if any(each[worker] in low for each in own)]
        least = min(map(self._clock, others), default=0)
        late = late or [worker for worker in others if self._clock(worker) == least]
        return [self._world_rank(worker) for worker in late]

    def acquire(self, lock: int) -> None:
        """Take a lock. One that a lost worker held is freed by `on_loss`."""
        if self.flags.lock(lock, self._rank + 1, _CHECK_SECONDS):
            return
        deadline = time.monotonic() + self._transport.timeout.total_seconds()
        with self._transport.activity.waiting((), "take a step of the optimiser") as wait:
            while not self.flags.lock(lock, self._rank + 1, _CHECK_SECONDS):
                owner = self.flags.value(lock) - 1  # -1 if it was freed just now.
                wait.ranks = [self._world_rank(owner)] if owner >= 0 else []
                self.check_workers()
                if time.monotonic() > deadline:
                    name = f"rank {self._world_rank(owner)}" if owner >= 0 else "another rank"
                    raise self._transport.membership.timeout_error(f"{name} to take a step of the optimiser")

    def try_acquire(self, lock: int) -> bool:
        """Take a lock if it is free; return whether it was."""
        return self.flags.swap(lock, 0, self._rank + 1)

    def take_over(self, lock: int, lost_worker: int) -> bool:
        """Take a lock that a lost worker holds; return whether it did. Of several workers that try, one succeeds."""
        return self.flags.swap(lock, lost_worker + 1, self._rank + 1)

    def release(self, lock: int) -> None:
        """Free a lock that this worker holds."""
        # Publishing also wakes those who wait for the lock.
        self.flags.publish(lock, 0)

    def release_lost(self, lock: int, lost_worker: int) -> bool:
        """Free a lock that a lost worker holds; return whether it did."""
        if not self.flags.swap(lock, lost_worker + 1, 0):
            return False
        self.flags.publish(
            self._indices.lock_freed, 1
        )  # A swap wakes no one; a publish does, those who wait for the lock too.
        return True

    def check_workers(self, steps: int = 0) -> None:
        """Raise if this rank must stop; mark, log and handle workers that are lost."""
        self._transport.check_open()
        self.check_stop(steps)
        for worker, reason in self._transport.missing().items():
            if self.flags.swap(int(self._indices.status[worker]), _ALIVE, _LOST):
                _log.warning(
                    "rank %d: worker %d left at clock %d, and %d go on: %s",
                    *(self._world_rank(self._rank), self._world_rank(worker)),
                    *(self._clock(worker), len(self.alive), reason),
                )
            # Every worker handles every loss: the one that logged it may be lost before it has.
            if int(self._counters[self._indices.status[worker]]) == _LOST:
                self._on_loss(worker)

    def _world_rank(self, worker: int) -> int:
        """Return the rank by which messages name a worker. On a channel of some ranks it is not the worker's number."""
        return self._transport.world_ranks[worker]
