"""Versions of single shards in shared memory: whether the next one is due, which updates make it, and its making.

How it works
------------
A version is due by the same rules as in `ledger.py`, evaluated on counters. The holder of the shard's lock makes it in
this order: publish `stepping` = v + 1, combine the updates, step, publish `version` = v + 1, publish `num_applied` of
each worker. If it is killed in between, `stepping` is ahead of `version`. The worker that takes the lock over then sets
`version` to `stepping` (`repair`): the step counts as taken, as far as it came. To take it again would apply a part of
it twice.
"""

from typing import NamedTuple

import numpy as np

from tutti.events import APPLY, Event
from tutti.strategies.parameter_server.ledger import Update, effective_updates
from tutti.strategies.parameter_server.shard_optimizer import update_scales
from tutti.strategies.parameter_server.shared_memory.context import SharedMemoryContext, applies_own_updates


class DueVersion(NamedTuple):
    """A version that can be made, and its updates."""

    version: int
    """The shard's version becomes this plus 1. Under a clocked consistency, the clock of all updates."""
    updates: list[tuple[int, int]]
    """Worker and clock of each update, by worker."""


class ShardVersions:
    """Makes single versions of single shards. All methods need the shard's lock, except `due`."""

    def __init__(self, context: SharedMemoryContext) -> None:
        self._context = context
        self._counters = context.counters
        self._consistency = context.consistency
        self._applies_own = applies_own_updates(context.consistency)

    def make_due_versions(self, shard_index: int) -> None:
        """Make all versions of a shard that are due."""
        while (due := self.due(shard_index)) is not None:
            self.make_version(shard_index, due.version, self.read_updates(shard_index, due))

    def due(self, shard_index: int) -> DueVersion | None:
        """Return the next version of a shard, if it is due. Needs no lock: a stale answer is checked again under it."""
        if self._applies_own:
            return None
        bucket_index = self._context.parameters.shards[shard_index].bucket_index
        if self._consistency.bound is None:
            return self._due_by_count(shard_index, bucket_index)
        counters = self._counters
        clocks, first_clocks = counters.clock[bucket_index], counters.first_clock[bucket_index]
        # The lowest version that some worker has pushed for, or -1 while a member has still to push. Loads with
        # acquire: the gradients that these clocks announce are visible.
        version = counters.flags.next_version(
            int(counters.version[shard_index]), clocks, first_clocks, counters.is_member[bucket_index]
        )
        if version < 0:
            return None
        # A worker that joined later than this version, or skipped it, has no update for it.
        has_update = (counters.values[first_clocks] <= version) & (counters.values[clocks] > version)
        return DueVersion(version, [(int(worker), version) for worker in np.flatnonzero(has_update)])

    def _due_by_count(self, shard_index: int, bucket_index: int) -> DueVersion | None:
        """Return the next version of a shard under a counting consistency, if enough updates wait."""
        counters = self._counters
        version = counters.version_of(shard_index)
        num_applied, arrival = counters.values[counters.num_applied[shard_index]], counters.values[counters.arrival]
        waiting = np.flatnonzero(counters.values[counters.clock[bucket_index]] > num_applied)
        # The order of arrival decides which updates make the version; at most one per worker waits.
        in_order = sorted(waiting, key=lambda worker: arrival[worker])
        num_members = int(counters.values[counters.is_member[bucket_index]].sum())
        # With fewer members than the quorum, one update of each makes a version. With none (at a barrier) nothing more
        # is awaited, and what is there is enough.
        quorum = min(self._consistency.quorum, num_members or len(in_order))
        if not in_order or len(in_order) < quorum:
            return None
        workers = sorted(map(int, in_order[:quorum]))  # By rank, as in `Ledger.take_due`: the same bits in every run.
        # A worker waits for each of its updates, so its only waiting one has the clock `num_applied`.
        return DueVersion(version, [(worker, int(num_applied[worker])) for worker in workers])

    def read_updates(self, shard_index: int, due: DueVersion) -> list[Update]:
        """Return the updates of a version, from the push buffers."""
        shard, pushes = self._context.parameters.shards[shard_index], self._context.pushes
        return [pushes.read(shard, worker, clock, due.version) for worker, clock in due.updates]

    def make_version(self, shard_index: int, version: int, updates: list[Update]) -> None:
        """Make the version after `version` of these updates."""
        # Before anything changes: if this worker is killed from here on, `repair` counts the step as taken.
        self._counters.publish_stepping(shard_index, version + 1)
        has_grad = self.combine(shard_index, version, updates)
        self.step(shard_index, version, updates, has_grad)

    def combine(self, shard_index: int, version: int, updates: list[Update]) -> np.ndarray:
        """Make the mean of updates; return for each segment whether it has a gradient."""
        context, now = self._context, self._context.transport.now()
        clip = context.strategy.clip if context.strategy.clips_updates else None
        shard = context.parameters.shards[shard_index]
        for update in updates:
            context.events.record(Event(APPLY, now, now, 0, (shard_index, version, update.worker, update.clock)))
            # A plain store: the worker reads it after the version, whose publish releases it.
            self._counters.values[self._counters.staleness[shard_index, update.worker]] = update.staleness
        if not (effective := effective_updates(updates, self._consistency)):
            return np.zeros(len(shard.segments), dtype=bool)
        scales = update_scales(effective, shard, self._consistency, context.transport.size, clip)
        return context.parameters.optimizers[shard_index].combine(effective, scales)

    def step(
        self, shard_index: int, version: int, updates: list[Update], has_grad: np.ndarray, factor: float = 1.0
    ) -> None:
        """Step by the mean that `combine` made, scaled by `factor`, and publish the version after `version`."""
        state = self._context.parameters.states[shard_index]
        if effective_updates(updates, self._consistency):
            if state is not None:
                state.refresh()
            # Updates are sorted by rank: the options of the lowest rank count for all.
            self._context.parameters.optimizers[shard_index].step(has_grad, updates[0].options, factor)
            if state is not None:
                state.publish()
        # The version first: a worker killed in between leaves updates that count as waiting, under a version that
        # has them. Clocked consistencies look at versions only; for counting ones a joint plan repairs `num_applied`.
        self._counters.publish_version(shard_index, version + 1)
        for update in updates:
            self._counters.publish_applied(shard_index, update.worker, update.clock + 1)

    def repair(self, shard_index: int) -> None:
        """Count a step that a lost worker had begun as taken."""
        begun = self._counters.stepping_of(shard_index)
        if begun > self._counters.version_of(shard_index):
            self._counters.flags.advance(self._counters.num_cut_short)
            self._counters.publish_version(shard_index, begun)
