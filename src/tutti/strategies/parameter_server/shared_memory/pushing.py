"""Pushing in shared memory: a worker writes its gradient into its ring, or steps the shared parameters with it."""

from dataclasses import replace

import numpy as np

from tutti.events import READ, Event
from tutti.replica import Bucket
from tutti.strategies.parameter_server.ledger import Update
from tutti.strategies.parameter_server.shared_memory.context import SharedMemoryContext, applies_own_updates
from tutti.strategies.parameter_server.shared_memory.shard_versions import ShardVersions
from tutti.strategies.parameter_server.shared_memory.stepping import Stepper
from tutti.strategies.parameter_server.worker import gradient_flags


class GradientPusher:
    """Makes a worker's gradients visible to all workers, and takes the steps that become due by them."""

    def __init__(self, context: SharedMemoryContext, versions: ShardVersions, stepper: Stepper) -> None:
        self._context = context
        self._versions = versions
        self._stepper = stepper
        self._applies_own = applies_own_updates(context.consistency)
        self.num_bytes = 0
        """Bytes of gradients pushed so far."""

    def push(self, bucket: Bucket, weight: float, norm: float, options: np.ndarray, is_void: bool = False) -> None:
        """Push a bucket.

        Args:
            bucket: holds the gradients; they are copied, or used before this returns.
            weight: number of samples that the gradients are the mean of.
            norm: norm of the whole gradient, where each update is clipped by itself; else 0.
            options: numeric options of the optimiser.
            is_void: push no gradient, but count the iteration.
        """
        context, index = self._context, bucket.index
        local = context.buckets[index]
        clock, now, bound = local.clock, context.transport.now(), context.consistency.bound
        for shard, base_version in zip(context.parameters.by_bucket[index], local.base_versions, strict=True):
            context.events.record(Event(READ, now, now, 0, (shard.index, clock, base_version)))
        local.clock += 1
        self.num_bytes += bucket.flat.nbytes
        if self._applies_own:
            self._apply(bucket, Update(context.rank, 0, weight, norm, options, None, None, clock, is_void=is_void))
        else:
            if bound is not None:
                # A bool: only the first bucket of an iteration counts.
                context.staleness[clock - local.version] += index == 0
            # Gradient first, then clock: a worker that sees the clock (acquire) also sees the gradient.
            context.pushes.write(bucket, clock, (weight, norm, is_void), options, local.base_versions)
            if bound is not None:
                # Just before: killed in between, a worker has this step counted and not used.
                context.counters.count_step(index, context.rank)
                context.counters.publish_clock(index, context.rank, local.clock)
                self._stepper.step_due([index])
            # Counting: the update is published as a whole, once backward has filled its last bucket.
            elif index + 1 == len(context.buckets):
                self._publish_update(index)
        local.is_stale = True  # Whether there really is a newer version costs nothing to find out here.

    def _publish_update(self, last_bucket: int) -> None:
        """Publish an update under a counting consistency: when its last bucket is written, all buckets together."""
        counters, rank = self._context.counters, self._context.rank
        # The atomic addition gives all updates of all workers one order. A plain store: the clocks below release it.
        counters.values[counters.arrival[rank]] = counters.flags.advance(counters.num_arrivals)
        # Bucket 0 last: joint steps look at its clock alone, and then find the whole update.
        for index, local in reversed(list(enumerate(self._context.buckets))):
            counters.count_step(index, rank)
            counters.publish_clock(index, rank, local.clock)
        # Updates that are counted and not applied at once are always stepped jointly: any bucket stands for all.
        self._stepper.step_due([last_bucket])

    def _apply(self, bucket: Bucket, whole: Update) -> None:
        """Step each shard of a bucket with this worker's gradient: under `Async`, each update is a version.

        `whole` is the update of the bucket, without what differs between shards.
        """
        context = self._context
        # `Async` workers wait for nobody, so this is where a worker learns that another has asked all to stop.
        context.registry.check_stop(context.replica.steps)
        flags = np.array(gradient_flags(bucket), dtype=bool)
        local = context.buckets[bucket.index]
        context.counters.count_step(bucket.index, context.rank)
        for shard, base_version in zip(context.parameters.by_bucket[bucket.index], local.base_versions, strict=True):
            has_grad = flags[[segment.slot_index for segment in shard.segments]]
            gradient = bucket.flat[shard.bucket_range]
            update = replace(whole, base_version=base_version, has_grad=has_grad, values=gradient)
            lock = int(context.counters.lock[shard.index])
            context.registry.acquire(lock)
            try:
                # Read under the lock: no other update can come between this version and the step.
                version = context.counters.version_of(shard.index)
                update.staleness = version - base_version
                self._versions.make_version(shard.index, version, [update])
            finally:
                context.registry.release(lock)
            if shard.index == 0:
                context.staleness[update.staleness] += 1
        # Only for the log and for `WorkerRegistry.progress`: the versions are published already.
        context.counters.publish_clock(bucket.index, context.rank, local.clock)
