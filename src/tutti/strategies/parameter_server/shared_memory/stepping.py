"""Stepping in shared memory: any worker that finds a shard's next version due takes its lock and makes the version.

How it works
------------
A worker that has just pushed, or waits, calls `step_due`: for each shard whose version is due (`shard_versions.py`) and
whose lock is free, it takes the lock and makes all versions that are due. If the lock is taken, nothing is lost: the
holder looks once more after it has let go of the lock.

There are two ways to step. `ShardStepper` steps each shard by itself, under its own lock. `JointStepper`
(`joint_stepping.py`) steps all shards together, under one lock.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import ExitStack

from tutti.strategies.parameter_server.shared_memory.context import SharedMemoryContext
from tutti.strategies.parameter_server.shared_memory.shard_versions import ShardVersions


class Stepper(ABC):
    """Makes the versions that are due, and protects their making by locks."""

    @abstractmethod
    def step_due(self, buckets: Iterable[int]) -> None:
        """Make all versions of the shards of these buckets that are due, unless another worker is making them."""

    @abstractmethod
    def join_under_lock(self, join: Callable[[int], None]) -> None:
        """Call `join` with the index of each bucket, while no version of its shards can be made.

        All versions that are due then are made before, without this worker.
        """

    @abstractmethod
    def repair(self, shard_index: int) -> None:
        """Count a step that a lost worker had begun as taken. Needs the lock of the shard, which that worker held."""


class ShardStepper(Stepper):
    """Steps each shard by itself, under its own lock."""

    def __init__(self, context: SharedMemoryContext, versions: ShardVersions) -> None:
        self._context = context
        self._counters = context.counters
        self._registry = context.registry
        self._versions = versions

    def step_due(self, buckets: Iterable[int]) -> None:
        for bucket_index in buckets:
            for shard in self._context.parameters.by_bucket[bucket_index]:
                lock = int(self._counters.lock[shard.index])
                # Again after the release: a worker whose push came after the last look found the lock taken, and relies
                # on this one to look once more.
                while self._versions.due(shard.index) and self._registry.try_acquire(lock):
                    try:
                        self._versions.make_due_versions(shard.index)
                    finally:
                        self._registry.release(lock)

    def join_under_lock(self, join: Callable[[int], None]) -> None:
        for bucket_index, shards in enumerate(self._context.parameters.by_bucket):
            locks = [int(self._counters.lock[shard.index]) for shard in shards]
            with ExitStack() as held:
                # In the order of shards on every rank: two workers that join at once cannot each wait for the other.
                for lock in locks:
                    self._registry.acquire(lock)
                    held.callback(self._registry.release, lock)
                for shard in shards:
                    self._versions.make_due_versions(shard.index)
                join(bucket_index)

    def repair(self, shard_index: int) -> None:
        self._versions.repair(shard_index)
