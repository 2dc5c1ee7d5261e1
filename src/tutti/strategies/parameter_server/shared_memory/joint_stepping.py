"""Joint steps in shared memory: all shards make their next version together, under one lock.

How it works
------------
Needed where the mean gradient is clipped by the norm of the whole, and under `SoftSync`, where all shards must be made
of the same updates. The lock of shard 0 stands for the locks of all.

Before the lock holder steps, it writes a plan: the clock of each worker's update (`joint_clocks`), then the version
that results (`joint_version`). If it is killed, the worker that takes the lock over completes the plan by counters
only: every shard is set to that version, and the planned updates count as applied. A shard whose step was not taken
misses them. So shards never disagree about which updates they contain.
"""

from collections.abc import Callable, Iterable
from math import sqrt

from tutti.strategies.parameter_server.shard_optimizer import clip_factor
from tutti.strategies.parameter_server.shared_memory.context import SharedMemoryContext
from tutti.strategies.parameter_server.shared_memory.shard_versions import DueVersion, ShardVersions
from tutti.strategies.parameter_server.shared_memory.stepping import Stepper

_JOINT_LOCK = 0
"""The shard whose lock stands for those of all shards."""


class JointStepper(Stepper):
    """Steps all shards together, under one lock."""

    def __init__(self, context: SharedMemoryContext, versions: ShardVersions) -> None:
        self._context = context
        self._counters = context.counters
        self._lock = int(context.counters.lock[_JOINT_LOCK])
        self._versions = versions

    def step_due(self, buckets: Iterable[int]) -> None:
        """Make all joint versions that are due, unless another worker is making them. Any bucket means all."""
        while self._all_due() and self._context.registry.try_acquire(self._lock):
            try:
                self._make_due_versions()
            finally:
                self._context.registry.release(self._lock)

    def join_under_lock(self, join: Callable[[int], None]) -> None:
        self._context.registry.acquire(self._lock)
        try:
            self._make_due_versions()
            for bucket_index in range(len(self._context.buckets)):
                join(bucket_index)
        finally:
            self._context.registry.release(self._lock)

    def _make_due_versions(self) -> None:
        """Make all joint versions that are due. Needs the lock."""
        while due_by_shard := self._all_due():
            # Any shard's: all have the same version. Their updates may differ under a clocked consistency only, after a
            # loss, and that is repaired by versions alone.
            self._write_plan(next(iter(due_by_shard.values())))
            parts, square_norm = [], 0.0
            # All means before any step: the norm of the whole gradient is known after the last of them.
            for shard_index, due in due_by_shard.items():
                updates = self._versions.read_updates(shard_index, due)
                self._counters.publish_stepping(shard_index, due.version + 1)
                has_grad = self._versions.combine(shard_index, due.version, updates)
                square_norm += self._context.parameters.optimizers[shard_index].square_norm(has_grad)
                parts.append((shard_index, due.version, updates, has_grad))
            strategy, factor = self._context.strategy, 1.0
            if strategy.clips_means:
                factor = clip_factor(strategy.clip or 0.0, sqrt(square_norm))
            for shard_index, version, updates, has_grad in parts:
                self._versions.step(shard_index, version, updates, has_grad, factor)
            self._counters.flags.publish(self._counters.joint_version, 0)  # The plan is done: nothing to repair.

    def repair(self, shard_index: int) -> None:
        """Complete the plan of a lost worker: its version counts as made, and its updates as applied, in all shards."""
        # `shard_index` is that of the joint lock: no worker takes another shard's lock.
        counters = self._counters
        version = counters.flags.value(counters.joint_version)
        if version:
            counters.flags.advance(counters.num_cut_short)
        for shard in self._context.parameters.shards if version else ():
            if counters.version_of(shard.index) < version:
                counters.publish_version(shard.index, version)
            # For counting consistencies, where an update that is not counted as applied would be applied again.
            for worker, num_applied in enumerate(counters.values[counters.joint_clocks].tolist()):
                if num_applied > counters.flags.value(int(counters.num_applied[shard.index, worker])):
                    counters.publish_applied(shard.index, worker, num_applied)
        counters.flags.publish(counters.joint_version, 0)

    def _write_plan(self, due: DueVersion) -> None:
        """Write down what is about to be stepped, for the worker that takes over if this one is killed."""
        counters = self._counters
        counters.values[counters.joint_clocks] = 0
        for worker, clock in due.updates:
            counters.values[counters.joint_clocks[worker]] = clock + 1
        # Last: while the version is 0, the clocks mean nothing.
        counters.flags.publish(counters.joint_version, due.version + 1)

    def _all_due(self) -> dict[int, DueVersion]:
        """Return the next version of each shard that has one; nothing if a member has still to push for any shard."""
        shards = self._context.parameters.shards
        if self._context.consistency.bound is None:
            due = self._versions.due(0)  # Shard 0 decides for all, so that all are made of the same updates.
            return {} if due is None else {shard.index: due for shard in shards}
        due_by_shard = {}
        for shard in shards:
            due = self._versions.due(shard.index)
            if due is not None:
                due_by_shard[shard.index] = due
            # A member has still to push for this shard, so all shards wait. If no push is awaited, the shard's updates
            # are lost with their workers: the others step without it.
            elif self._awaits_pushes(shard.bucket_index, self._counters.version_of(shard.index)):
                return {}
        # After a loss shards may be at different versions: those that are behind step first.
        lowest = min((due.version for due in due_by_shard.values()), default=0)
        return {index: due for index, due in due_by_shard.items() if due.version == lowest}

    def _awaits_pushes(self, bucket_index: int, version: int) -> bool:
        """Whether a member has still to push a bucket for the version after `version`."""
        counters = self._counters
        is_member = counters.values[counters.is_member[bucket_index]] == 1
        return bool((counters.values[counters.clock[bucket_index]][is_member] <= version).any())
