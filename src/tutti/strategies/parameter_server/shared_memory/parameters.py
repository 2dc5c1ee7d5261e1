"""Parameters in shared memory, their shards, and the means to step them on any rank."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tutti.replica import Bucket, Replica
from tutti.strategies.parameter_server.shard_optimizer import ShardOptimizer, needs_whole_parameters
from tutti.strategies.parameter_server.shards import ParameterShard, cut_into_shards
from tutti.strategies.parameter_server.shared_memory.optimizer_state import SharedOptimizerState
from tutti.transports.shared_memory.reduction import KERNELS

if TYPE_CHECKING:
    from tutti.transports.shared_memory.transport import SharedMemoryTransport

_MIN_SHARD_BYTES = 256 * 2**10
"""A smaller shard is stepped before a second rank could take a part of it."""


def cut_for_host(replica: Replica, num_workers: int, whole_buckets: bool) -> list[ParameterShard]:
    """Cut buckets into as many shards as there are workers to step them, where they are large enough.

    Args:
        replica: the model.
        num_workers: workers of the host.
        whole_buckets: make one shard of each bucket.
    """
    # Such an optimiser looks at whole rows or tensors, so no parameter may be cut.
    keep_whole = needs_whole_parameters(replica.optimizer)
    shards: list[ParameterShard] = []
    for bucket in replica.buckets:
        num_shards = 1 if whole_buckets else max(1, min(num_workers, bucket.flat.nbytes // _MIN_SHARD_BYTES))
        shards += cut_into_shards([bucket], num_shards, keep_whole, compress=False, first_index=len(shards))
    return shards


class SharedParameters:
    """The parameters of all buckets in shared memory, and an optimiser for each shard.

    Values and the optimiser's state are changed by the holder of a shard's lock only. They are read without a lock.
    """

    def __init__(self, replica: Replica, transport: "SharedMemoryTransport", shards: list[ParameterShard]) -> None:
        """Map the memory, with the values of rank 0. Collective."""
        self.shards = shards
        self.by_bucket = [[s for s in shards if s.bucket_index == bucket.index] for bucket in replica.buckets]
        self.values: list[Tensor] = []
        """Values of each bucket, flat."""
        optimizers: dict[int, tuple[ShardOptimizer, SharedOptimizerState | None]] = {}
        for bucket in replica.buckets:
            values = transport.shared_tensor(bucket.flat.numel(), bucket.flat.dtype)
            if transport.rank == 0:
                # Other ranks read it after the last collective call of `SharedMemoryWorker._map`, which orders it.
                values.copy_(bucket.image())
            self.values.append(values)
            for shard in self.by_bucket[bucket.index]:
                optimizers[shard.index] = _shared_optimizer(shard, bucket, values, replica, transport)
        self.optimizers = [optimizers[shard.index][0] for shard in shards]
        self.states = [optimizers[shard.index][1] for shard in shards]
        """State of each shard's optimiser; None for running statistics, which have none."""
        self.views = [bucket.views(values) for bucket, values in zip(replica.buckets, self.values, strict=True)]
        """Views of the parameters of each bucket, in their shapes."""

    def load(self, images: list[Tensor], optimizer_state: dict[str, dict[str, object]]) -> None:
        """Replace all values and the optimiser's state. One rank does it, within a barrier."""
        for values, image in zip(self.values, images, strict=True):
            values.copy_(image)
        for optimizer, state in zip(self.optimizers, self.states, strict=True):
            if state is not None:
                optimizer.load_state(optimizer_state)
                state.reset()


def _shared_optimizer(
    shard: ParameterShard, bucket: Bucket, values: Tensor, replica: Replica, transport: "SharedMemoryTransport"
) -> tuple[ShardOptimizer, SharedOptimizerState | None]:
    """Return an optimiser that steps a shard's part of the shared values, and its shared state. Collective."""
    optimizer = ShardOptimizer(shard, bucket, replica.optimizer, values[shard.bucket_range])
    optimizer.mean_kernel = KERNELS.get(values.dtype)  # Compiled: one pass over all workers' gradients.
    # Running statistics are replaced by their mean, so no optimiser state is needed.
    if not shard.is_trained:
        return optimizer, None
    num_segments = len(shard.segments)
    memory = transport.shared_tensor(SharedOptimizerState.required_bytes(shard.numel, num_segments), torch.uint8)
    state = SharedOptimizerState(memory, num_segments, optimizer.segment_state)
    if transport.rank == 0:
        # Rank 0's optimiser state counts (a resumed run has one): other ranks drop theirs in their first refresh.
        state.reset()
    return optimizer, state
