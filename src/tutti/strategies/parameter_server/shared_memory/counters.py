"""Counters in shared memory by which the workers of a host coordinate: their layout, and what each of them means."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tutti.transports.shared_memory.flags import Flags

_NUM_RESERVED = 16
"""Counters before these belong to `Flags` itself."""


class CounterLayout:
    """Allocates indices among the counters of one `Flags`, in the same order on every rank."""

    def __init__(self) -> None:
        self.num_counters = _NUM_RESERVED

    def allocate(self, *shape: int) -> np.ndarray:
        """Return the indices of new counters, as an array of that shape."""
        # Ranks exchange no indices: they agree because all of them allocate the same shapes in the same order.
        numel = int(np.prod(shape))
        self.num_counters += numel
        return np.arange(self.num_counters - numel, self.num_counters, dtype=np.int64).reshape(shape)


class ShardCounters:
    """Indices of the counters of all buckets and shards, and access to them.

    Every counter starts at 0. "Owner" below is the worker whose column it is; "lock holder" the one that holds the
    shard's lock. No other worker writes a counter, with the exceptions of `ClockMembership.remove_lost`.
    """

    def __init__(self, layout: CounterLayout, num_buckets: int, num_shards: int, num_workers: int) -> None:
        """Allocate all counters; `open` follows once the memory is mapped."""
        # What workers publish of themselves: what they have pushed, and whether they are waited for.
        self.clock = layout.allocate(num_buckets, num_workers)
        """[bucket, worker]: number of updates pushed. Written by the owner, after the gradient."""
        self.num_steps = layout.allocate(num_buckets, num_workers)
        """[bucket, worker]: number of steps whose gradient the owner has pushed, or begun to apply. Not the clock,
        which moves on when the owner joins. Written by the owner, before its clock."""
        self.first_clock = layout.allocate(num_buckets, num_workers)
        """[bucket, worker]: the first clock since the owner joined last; below it the owner pushed nothing."""
        self.is_member = layout.allocate(num_buckets, num_workers)
        """[bucket, worker]: 1 while versions wait for the owner."""
        self.arrival = layout.allocate(num_workers)
        """[worker]: position of the owner's last update among all, under a counting consistency."""
        self.num_arrivals = int(layout.allocate(1)[0])
        """Updates of all workers so far, under a counting consistency. Any worker adds 1, atomically."""
        # What lock holders publish of shards: what is made, and what is being made.
        self.version = layout.allocate(num_shards)
        """[shard]: number of steps taken. Written by the lock holder, after the step."""
        self.lock = layout.allocate(num_shards)
        """[shard]: rank + 1 of the lock holder; 0 if free. Taken by compare-and-swap."""
        self.stepping = layout.allocate(num_shards)
        """[shard]: the version that is being made, or was made last. Written by the lock holder, before the step."""
        self.num_applied = layout.allocate(num_shards, num_workers)
        """[shard, worker]: updates of the worker that are in a version. Written by the lock holder."""
        self.staleness = layout.allocate(num_shards, num_workers)
        """[shard, worker]: staleness of the worker's last applied update. Written by the lock holder."""
        # The plan of a joint step, for the worker that takes over if it is cut short.
        self.joint_version = int(layout.allocate(1)[0])
        """The version that all shards are being stepped to together; 0 if none is. Written by the lock holder."""
        self.joint_clocks = layout.allocate(num_workers)
        """[worker]: 1 + clock of the worker's update in that joint step; 0 if it has none."""

        self.num_cut_short = int(layout.allocate(1)[0])
        """Steps of the optimiser that a lost lock holder had begun. Whoever takes its lock over adds 1, atomically."""

    def open(self, flags: "Flags") -> None:
        """Use the counters of `flags`."""
        self.flags = flags
        self.values = flags.counters
        """The counters themselves, for plain reads that may be stale, and for stores that a publish follows."""

    def version_of(self, shard_index: int) -> int:
        """Return a shard's version; what was written before it is visible."""
        return self.flags.value(int(self.version[shard_index]))

    def publish_version(self, shard_index: int, version: int) -> None:
        """Set a shard's version, after everything that was written before, and wake those who wait."""
        self.flags.publish(int(self.version[shard_index]), version)

    def stepping_of(self, shard_index: int) -> int:
        """Return the version of a shard that is being made, or was made last."""
        return self.flags.value(int(self.stepping[shard_index]))

    def publish_stepping(self, shard_index: int, version: int) -> None:
        """Announce that a version of a shard is being made."""
        self.flags.publish(int(self.stepping[shard_index]), version)

    def publish_clock(self, bucket_index: int, worker: int, clock: int) -> None:
        """Set a worker's clock, after the gradient that it announces."""
        self.flags.publish(int(self.clock[bucket_index, worker]), clock)

    def count_step(self, bucket_index: int, worker: int) -> None:
        """Count a step of a worker, before what makes its gradient visible: its publish comes later."""
        self.values[self.num_steps[bucket_index, worker]] += 1

    def publish_applied(self, shard_index: int, worker: int, num_applied: int) -> None:
        """Set how many updates of a worker are in a shard's version."""
        self.flags.publish(int(self.num_applied[shard_index, worker]), num_applied)

    def set_member(self, bucket_index: int, worker: int, is_member: bool) -> None:
        """Set whether versions of a bucket wait for a worker."""
        self.flags.publish(int(self.is_member[bucket_index, worker]), int(is_member))
