"""Ledger of one shard: which updates have arrived, which of them make the next version, and who may pull.

How it works
------------
A ledger holds no values and never waits. Its server calls `push` when an update arrives, `take_due` until that returns
nothing, and then `is_readable` for each pull that waits. Only the server's thread calls it, so it has no lock.

Every worker has a *clock* in every ledger: the number of updates that it has pushed, skipped ones included. The
shard has a *version*: the number of optimiser steps taken. What makes a version depends on the consistency.

- Clocked (`BSP`, `SSP`): version v + 1 is made of all pending updates of clock v. It is due once every member's clock
  is beyond v. A worker in iteration c may pull when the version is at least c - staleness.
- Counting (`SoftSync`, `Async`): the next version is made of the first `quorum` pending updates, in order of arrival,
  whichever workers sent them. A worker may pull once none of its own updates is pending.
- Counting, in the synchronous start (`job.start_synchronously`): as long as any pending update is of a synchronous
  step, the next version is made of all pending updates, once every member has one. A worker waits until its update is
  in a version, so each has one at most. A member whose last update was not of a synchronous step is past the start: the
  others do not wait for it. So workers need not agree on the step in which the start ends.
- Counting on several servers: updates arrive at each server in another order. One server decides, by a ledger of its
  own, and sends what it decides to the others. Each ledger then waits for exactly the updates that the `UpdateOrder`
  has at its `order_position`.

Members are the workers that are waited for. The set is shared by all ledgers of a server and changed by the server
alone. A worker that leaves, or is lost, is removed from it: from then on no version and no pull waits for that worker.
What it has already pushed still counts, except under an `UpdateOrder`: there `discard_updates_from` drops what a
lost worker pushed, because the deciding server may never have received it.

Invariant: an update is in exactly one version; the updates of one worker are applied in the order of their clocks;
and the version never waits for a worker that is no member.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tutti.strategies.parameter_server.consistency import Consistency


@dataclass(eq=False)
class Update:
    """A worker's gradient of one shard, and the numbers that are pushed with it."""

    worker: int
    """Rank of the worker that pushed it."""
    base_version: int
    """Version of the parameters that the gradient was computed from."""
    weight: float
    """Number of samples that the gradient is the mean of, or `ADD_UP`."""
    norm: float
    """Norm of the worker's whole gradient, where each update is clipped by itself; else 0."""
    options: Any
    """Numeric options of the worker's optimiser (`OptimizerOptions.read`)."""
    has_grad: Any
    """One flag per segment: whether the worker has a gradient for it."""
    values: Any
    """The gradient, flat, in the shard's layout."""
    clock: int = 0
    """Number of updates that the worker pushed before this one; set by the ledger."""
    staleness: int = 0
    """Number of versions made between the pull it was computed from and its own; set by the ledger."""
    is_void: bool = False
    """Whether it only counts: the worker's `GradScaler` has found an inf, and there are no values."""
    is_synchronous: bool = False
    """Whether it is of a step of the synchronous start: then its version is made of an update of every worker."""


def effective_updates(updates: Sequence[Update], consistency: Consistency) -> list[Update]:
    """Return those of a version's updates that its step is made of; none if there is no step.

    In a synchronous step a void update makes the whole step void: one worker that has all samples would skip it.
    """
    effective = [update for update in updates if not update.is_void]
    synchronous = consistency.bound == 0 or any(update.is_synchronous for update in updates)
    return effective if len(effective) == len(updates) or not synchronous else []


UpdateIds = set[tuple[int, int]]
"""Updates, each named by its worker and clock."""


@dataclass
class UpdateOrder:
    """The agreed contents of each version, where several servers must make versions of the same updates."""

    alive: set[int]
    """Workers whose updates may still arrive; the server's own set, shared."""
    pending: list[UpdateIds] = field(default_factory=list)
    """Contents of the versions that some shard of this server has still to make."""
    num_forgotten: int = 0
    """Number of positions before the first of `pending`."""

    def at(self, position: int) -> UpdateIds | None:
        """Return the updates at a position of the order, or None if that is not decided yet."""
        position -= self.num_forgotten
        return self.pending[position] if position < len(self.pending) else None

    def forget_before(self, position: int) -> None:
        """Drop positions that all shards of the server have used."""
        del self.pending[: position - self.num_forgotten]
        self.num_forgotten = position

    def clear(self) -> None:
        """Start again from position 0."""
        self.pending.clear()
        self.num_forgotten = 0


class Ledger:
    """Decides which updates make a shard's next version, in whatever order they arrive.

    Updates of one worker arrive in the order in which it pushed them.
    """

    def __init__(self, consistency: Consistency, members: set[int], order: UpdateOrder | None = None) -> None:
        """Start at version 0.

        Args:
            consistency: when a version is due and who may pull it.
            members: the workers that are waited for; shared with the server's other ledgers.
            order: the agreed contents of versions, where shards of several servers must agree on them.
        """
        self.version = 0
        """Number of versions made. The optimiser's step for the last one may still be outstanding."""
        self.order_position = 0
        """Position in the order of the next version."""
        self._order = order
        self._consistency = consistency
        self._members = members
        self._clocks = dict.fromkeys(members, 0)
        self._num_pushed = dict.fromkeys(members, 0)
        """By worker: updates since the ledger has started. Not its clock, which moves on when it joins."""
        self._pending: list[Update] = []
        self._started: set[int] = set()
        """Workers whose last update was not of a synchronous step, under a counting consistency."""

    def restart(self) -> None:
        """Start again from version 0, with every worker at clock 0."""
        self.version = 0
        self.order_position = 0
        # Workers that left keep an entry: they may join again.
        self._clocks = dict.fromkeys(self._clocks, 0)
        self._num_pushed = dict.fromkeys(self._clocks, 0)
        self._pending.clear()
        self._started.clear()

    @property
    def is_idle(self) -> bool:
        """Whether every update that has arrived is in a version."""
        return not self._pending

    @property
    def awaits_updates(self) -> bool:
        """Under a clocked consistency: whether a member has still to push for the next version."""
        return any(self._clocks[worker] <= self.version for worker in self._members)

    @property
    def next_clock(self) -> int | None:
        """The lowest clock of the pending updates; None if there are none."""
        return min((update.clock for update in self._pending), default=None)

    def clock(self, worker: int) -> int:
        """Return the clock of a worker's next update."""
        return self._clocks[worker]

    def num_pushed(self, worker: int) -> int:
        """Return how many updates of a worker have arrived."""
        return self._num_pushed[worker]

    def join(self, worker: int) -> None:
        """Let a worker's next update be for the next version."""
        if self._consistency.bound is not None:
            # A worker that was away keeps its clock if that is ahead: what it pushed before is still pending.
            self._clocks[worker] = max(self.version, self._clocks[worker])

    def discard_updates_from(self, worker: int) -> None:
        """Drop the pending updates of a lost worker, if an order is kept: they may never be in it."""
        if self._order is not None:
            self._pending = [update for update in self._pending if update.worker != worker]

    def skip(self, clock: int) -> None:
        """Count the version of that clock as made: this shard has no update for it, and will get none."""
        self.version = max(self.version, clock + 1)

    def push(self, update: Update) -> None:
        """Record an update that has arrived, and set its clock."""
        update.clock = self._clocks[update.worker]
        # Counted here and not sent along: a connection keeps the order of a worker's pushes, so both ends count alike.
        self._clocks[update.worker] += 1
        self._num_pushed[update.worker] += 1
        self._pending.append(update)
        if update.is_synchronous:
            self._started.discard(update.worker)
        else:
            self._started.add(update.worker)

    def take_due(self) -> list[Update]:
        """Remove and return the updates of the next version, by rank of worker; an empty list if it is not due."""
        due = self._due()
        if due:
            # By identity: updates have no equality (`eq=False`).
            self._pending = [update for update in self._pending if update not in due]
            for update in due:
                # Versions made since the worker pulled what it computed from; the one being made is not counted.
                update.staleness = self.version - update.base_version
            self.version += 1
            # May be ahead of the version: positions whose updates are all lost are passed without a version.
            self.order_position += 1
        # The order of workers, not of arrival: sums of floating-point numbers then have the same bits in every run.
        return sorted(due, key=lambda update: update.worker)

    def _due(self) -> list[Update]:
        """Return the updates of the next version without removing them; an empty list if it is not due."""
        if not self._pending:
            return []
        if self._order is not None:
            return self._due_by_order()
        if self._consistency.bound is None and any(update.is_synchronous for update in self._pending):
            missing = self._members - self._started - {update.worker for update in self._pending}
            return [] if missing else self._pending
        if self._consistency.bound is None:
            # With fewer members than the quorum, one update of each makes a version. With none (at a barrier) nothing
            # more is awaited, and what is pending is enough.
            quorum = min(self._consistency.quorum, len(self._members) or len(self._pending))
            return self._pending[:quorum] if len(self._pending) >= quorum else []
        if self.awaits_updates:
            return []
        # No update may be left for the next version, if its workers are gone: then go on to the first that has one.
        self.version = max(self.version, min(update.clock for update in self._pending))
        return [update for update in self._pending if update.clock == self.version]

    def _due_by_order(self) -> list[Update]:
        """Return the updates at this ledger's position of the agreed order, if all that can still arrive are here."""
        assert self._order is not None
        while (wanted := self._order.at(self.order_position)) is not None:
            arrived = [update for update in self._pending if (update.worker, update.clock) in wanted]
            missing_workers = {worker for worker, _ in wanted} - {update.worker for update in arrived}
            # An update that was ordered, but has not arrived here: wait for it if its worker can still send it.
            if missing_workers & self._order.alive:
                return []
            if arrived:
                return arrived
            self.order_position += 1  # All updates of this position are lost with their workers.
        return []

    def is_readable(self, worker: int, wanted_version: int) -> bool:
        """Whether a worker may pull: `wanted_version` is made, or under a counting consistency its own updates are in.

        Args:
            worker: rank of the worker that pulls.
            wanted_version: the oldest version that it accepts; ignored under a counting consistency.
        """
        if self._consistency.bound is None:
            return all(update.worker != worker for update in self._pending)
        return self.version >= wanted_version
