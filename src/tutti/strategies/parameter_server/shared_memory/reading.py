"""Reading in shared memory: waits until the shared parameters are new enough, and copies them into the model.

How it works
------------
Under a clocked consistency of staleness s, a worker at clock c waits in two stages: first until every member has pushed
c - s updates, then until every shard of the bucket has version c - s. Between the stages it takes due steps itself, so
the second wait is only for a worker that is already stepping. Under a counting consistency it waits until its own last
update is applied. Under `Async(locks=True)` it has applied that itself, and never waits. While the training starts
synchronously, s is 0 (`staleness_bound`).

The first wait is ended by the members' pushes; the second by the lock holder. `WorkerRegistry.wait` looks every 0.2 s
for lost workers: a lost member is a member no more, and a lost holder's lock is taken over
(`ClockMembership.remove_lost`).

The copy takes no lock. Another worker may step meanwhile, and the copy may then hold parts of two versions. Both
are at least as new as the consistency demands.
"""

from collections.abc import Iterable
from functools import partial

import torch

from tutti.events import PULL, Event
from tutti.strategies.parameter_server.shared_memory.context import SharedMemoryContext, applies_own_updates
from tutti.strategies.parameter_server.shared_memory.stepping import Stepper
from tutti.strategies.parameter_server.shared_memory.worker_registry import Awaited
from tutti.strategies.parameter_server.staleness_bound import staleness_bound


class ParameterReader:
    """Copies shared parameters into this worker's model, once they are new enough."""

    def __init__(self, context: SharedMemoryContext, stepper: Stepper) -> None:
        self._context = context
        self._counters = context.counters
        self._stepper = stepper
        self._applies_own = applies_own_updates(context.consistency)
        self.num_bytes = 0
        """Bytes of parameters read so far."""

    def wait_and_read(self, buckets: Iterable[int]) -> None:
        """Wait for those of these buckets that are stale, and read them."""
        stale = [index for index in buckets if self._context.buckets[index].is_stale]
        if not stale:
            return
        start_s = self._context.transport.now()
        for index in stale:
            self._context.registry.wait(partial(self._remaining, index), self._context.replica.steps)
        self.read(stale)
        self._context.events.record(Event(PULL, start_s, self._context.transport.now()))

    def _remaining(self, bucket_index: int) -> Awaited | None:
        """Return the counters, and the value they must reach, before a bucket may be read; None when it may."""
        if self._applies_own:
            return None
        context, counters, flags = self._context, self._counters, self._counters.flags
        shards = [shard.index for shard in context.parameters.by_bucket[bucket_index]]
        clock, bound = context.buckets[bucket_index].clock, staleness_bound(context.consistency, context.replica)
        if bound is None:
            # Counting: this worker's updates must be in every shard of the bucket.
            num_applied = counters.num_applied[shards, context.rank]
            if flags.reached(num_applied, clock):
                return None
            self._stepper.step_due([bucket_index])
            return None if flags.reached(num_applied, clock) else (num_applied, clock)
        needed, versions = clock - bound, counters.version[shards]
        if flags.reached(versions, needed):
            return None
        # A member that leaves now does not end the wait for its clock: `wait` asks here again after at most 0.2 s.
        is_member = counters.values[counters.is_member[bucket_index]] == 1
        member_clocks = counters.clock[bucket_index][is_member]
        if not flags.reached(member_clocks, needed):
            return member_clocks, needed  # While a member has not pushed, no worker can make the version.
        self._stepper.step_due([bucket_index])
        return None if flags.reached(versions, needed) else (versions, needed)

    def read(self, buckets: Iterable[int]) -> None:
        """Copy the present values of these buckets into the model."""
        context, counters = self._context, self._counters
        with torch.no_grad():
            for index in buckets:
                bucket, local = context.replica.buckets[index], context.buckets[index]
                shards = context.parameters.by_bucket[index]
                # Versions first: what is copied afterwards is at least as new.
                local.base_versions = [counters.version_of(shard.index) for shard in shards]
                torch._foreach_copy_([slot.tensor for slot in bucket.slots], context.parameters.views[index])
                local.version = min(local.base_versions)
                self.num_bytes += bucket.flat.nbytes
                # The steppers have stored the staleness of this worker's update; once per iteration, for the first
                # shard.
                counting = context.consistency.bound is None and not self._applies_own
                if counting and index == 0 and local.is_stale:
                    context.staleness[int(counters.values[counters.staleness[0, context.rank]])] += 1
                local.is_stale = False
