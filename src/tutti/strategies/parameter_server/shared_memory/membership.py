"""Membership of a worker in versions: joining, leaving, barriers, and the removal of lost workers."""

from collections.abc import Callable
from functools import partial

from tutti.events import PULL, Event
from tutti.strategies.parameter_server.shared_memory.context import SharedMemoryContext
from tutti.strategies.parameter_server.shared_memory.reading import ParameterReader
from tutti.strategies.parameter_server.shared_memory.shard_versions import ShardVersions
from tutti.strategies.parameter_server.shared_memory.stepping import Stepper
from tutti.strategies.parameter_server.shared_memory.worker_registry import STATE, Awaited


class ClockMembership:
    """Whether versions wait for this worker, and from which clock on.

    A worker writes only its own `is_member` and `first_clock` counters. There is one exception: any worker may clear
    the `is_member` counters of a lost one.
    """

    def __init__(
        self, context: SharedMemoryContext, versions: ShardVersions, stepper: Stepper, reader: ParameterReader
    ) -> None:
        self._context = context
        self._counters = context.counters
        self._registry = context.registry
        self._versions = versions
        self._stepper = stepper
        self._reader = reader
        self._all_buckets = range(len(context.buckets))

    def leave(self) -> None:
        """Let others make versions without this worker, and take the steps that become due by that."""
        self._set_member(False)
        self._stepper.step_due(self._all_buckets)

    def withdraw(self) -> None:
        """Let others make versions without this worker."""
        self._set_member(False)

    def join(self) -> None:
        """Let versions wait for this worker again, from the next one on."""
        # Under the locks: so no version is made between reading it and becoming a member.
        self._stepper.join_under_lock(self._join_bucket)
        for local in self._context.buckets:
            # The shared values have changed while this worker was away: its next wait reads them.
            local.is_stale = True

    def _join_bucket(self, bucket_index: int) -> None:
        """Make this worker a member of one bucket's versions, from the next one on. Needs the locks of its shards."""
        self._start_at_version(bucket_index)
        self._counters.set_member(bucket_index, self._context.rank, True)

    def barrier(self, action: Callable[[int], None] = lambda number: None, call: str = STATE) -> None:
        """Wait for all living workers; when every update is applied, run `action`, read, and go on together."""
        start_s = self._context.transport.now()
        self.leave()
        self._registry.barrier(partial(self._complete_barrier, action), call)
        self._context.events.record(Event(PULL, start_s, self._context.transport.now()))

    def _complete_barrier(self, action: Callable[[int], None], number: int) -> None:
        """Apply what is pushed, run the barrier's action, read, and become a member again."""
        # Every worker has left, so every pushed update can be applied; only a worker in mid-step is waited for.
        self._registry.wait(self._unapplied)
        action(number)
        for index in self._all_buckets:
            self._start_at_version(index)
        self._reader.read(self._all_buckets)
        # Last, and still within the barrier: all workers are members again before any of them pushes.
        self._set_member(True)

    def remove_lost(self, worker: int) -> None:
        """Go on without a lost worker: no version waits for it, and its locks are taken over. May run repeatedly."""
        # First: the versions that the last line looks for must not wait for the lost worker.
        for index in self._all_buckets:
            self._counters.set_member(index, worker, False)
        for shard_index in range(len(self._context.parameters.shards)):
            # Joint steps only ever take the lock of shard 0, so for the other shards nothing is taken over.
            lock = int(self._counters.lock[shard_index])
            if self._registry.take_over(lock, worker):  # From here on no other worker repairs it.
                self._stepper.repair(shard_index)
                self._registry.release(lock)
        self._stepper.step_due(self._all_buckets)  # Versions that waited for the lost worker are due now.

    def _unapplied(self) -> Awaited | None:
        """Return the version of a shard that a worker is still making; None when every update is applied."""
        self._stepper.step_due(self._all_buckets)
        counters = self._counters
        for shard in self._context.parameters.shards:
            version = counters.version_of(shard.index)
            # `stepping` ahead of `version`: a worker is in this step. It publishes the version, or is lost and
            # repaired.
            if counters.stepping_of(shard.index) > version or self._versions.due(shard.index) is not None:
                return counters.version[[shard.index]], version + 1
        return None

    def _set_member(self, is_member: bool) -> None:
        for index in self._all_buckets:
            self._counters.set_member(index, self._context.rank, is_member)

    def _start_at_version(self, bucket_index: int) -> None:
        """Let this worker's next push of a bucket be for the next version, unless it has pushed further already."""
        counters, local, rank = self._counters, self._context.buckets[bucket_index], self._context.rank
        # Any shard of the bucket: all due versions are made, and clocks count per bucket, so all have the same version.
        version = counters.version_of(self._context.parameters.by_bucket[bucket_index][0].index)
        if self._context.consistency.bound is not None and version > local.clock:
            local.clock = version
            # Before the clock, whose publish releases it: the clocks skipped here must never look like pushed updates.
            counters.values[counters.first_clock[bucket_index, rank]] = version
            counters.publish_clock(bucket_index, rank, version)
