"""Pushed gradients in shared memory: a ring of buffers for every worker and bucket.

A worker writes its update of clock c into entry c mod depth of its own ring, then publishes its clock. The worker that
makes the version reads the entry. The depth is the staleness bound + 1. A worker pushes clock c only after it has read
version c - bound, which contains its update of clock c - bound - 1: so the entry that it overwrites is always applied.
Under a counting consistency the depth is 1, because a worker waits for each of its updates to be applied.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tutti.replica import Bucket, Replica
from tutti.strategies.parameter_server.ledger import Update
from tutti.strategies.parameter_server.shards import ParameterShard
from tutti.strategies.parameter_server.worker import gradient_flags

if TYPE_CHECKING:
    from tutti.transports.shared_memory.transport import SharedMemoryTransport


_FIXED = 3
"""Numbers of an update before its options: weight, norm, whether it is void."""


class PushBuffers:
    """Gradients that workers have pushed, and the numbers that go with them."""

    def __init__(
        self,
        replica: Replica,
        transport: "SharedMemoryTransport",
        shards_by_bucket: list[list[ParameterShard]],
        num_options: int,
        depth: int,
    ) -> None:
        """Map the memory. Collective. A depth of 0 maps no gradients: workers apply their own."""
        self._rank = transport.rank
        self._shards_by_bucket = shards_by_bucket
        self._num_options = num_options
        self._depth = depth
        self._numbers: list[np.ndarray] = []
        """By bucket, [worker, entry]: `_FIXED` numbers, options, base versions of shards, a flag for each slot."""
        self._gradients: list[list[Tensor]] = []
        """By bucket and worker, [entry]: the flat gradient."""
        for bucket in replica.buckets if depth else ():
            # All as float64, which holds versions exactly up to 2**53.
            width = _FIXED + num_options + len(shards_by_bucket[bucket.index]) + len(bucket.slots)
            numbers = transport.shared_tensor(transport.size * depth * width, torch.float64)
            self._numbers.append(numbers.numpy().reshape(transport.size, depth, width))
            # Gradients lie in memory of the worker that writes them; the numbers above are small and share one
            # segment.
            memories = transport.per_rank_tensors(depth * bucket.flat.numel(), bucket.flat.dtype)
            self._gradients.append([memory.view(depth, -1) for memory in memories])

    def write(
        self,
        bucket: Bucket,
        clock: int,
        fixed: tuple[float, float, bool],
        options: np.ndarray,
        base_versions: list[int],
    ) -> None:
        """Write this worker's update of a bucket. Others may read it once its clock is published.

        `fixed` are its weight, its norm and whether it is void: then it has no gradient.
        """
        entry = clock % self._depth
        # The entry is free: its last update is applied (see above). No fence is needed before `publish_clock`.
        if not fixed[2]:
            self._gradients[bucket.index][self._rank][entry].copy_(bucket.flat)
        self._numbers[bucket.index][self._rank, entry] = [*fixed, *options, *base_versions, *gradient_flags(bucket)]

    def read(self, shard: ParameterShard, worker: int, clock: int, version: int) -> Update:
        """Return a worker's update of a shard, for the version after `version`. Its gradient is not copied."""
        entry, shards = clock % self._depth, self._shards_by_bucket[shard.bucket_index]
        numbers = self._numbers[shard.bucket_index][worker, entry]
        options_stop = _FIXED + self._num_options
        base_version = int(numbers[options_stop + shards.index(shard)])
        flags = numbers[options_stop + len(shards) :]
        return Update(
            worker,
            base_version,
            weight=float(numbers[0]),
            norm=float(numbers[1]),
            options=numbers[_FIXED:options_stop].copy(),  # Kept by the optimiser, longer than the entry lasts.
            # Flags are per slot of the bucket; the shard needs those of its own segments.
            has_grad=flags[[segment.slot_index for segment in shard.segments]] != 0,
            values=self._gradients[shard.bucket_index][worker][entry][shard.bucket_range],
            clock=clock,
            staleness=version - base_version,
            is_void=bool(numbers[2]),
        )
