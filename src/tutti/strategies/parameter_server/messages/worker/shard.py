"""State of one shard on a worker: what the model holds of it, and the pull that is under way."""

import torch
from torch import Tensor

from tutti.codecs.base import State
from tutti.replica import Bucket, Replica
from tutti.replica.buckets import in_memory_order
from tutti.strategies.parameter_server.messages.buffers import BufferPool
from tutti.strategies.parameter_server.messages.config import ServerGroupConfig
from tutti.strategies.parameter_server.messages.server import Server
from tutti.strategies.parameter_server.messages.wire import ReplyHeader
from tutti.strategies.parameter_server.shards import ParameterShard
from tutti.transports import Work
from tutti.transports.base import Signal


class WorkerShard:
    """A shard as a worker sees it.

    The training thread writes `version`, `clock` and `pending_pull`. While a pull is pending, `reply` and
    `received` belong to the generator that receives it.
    """

    def __init__(self, spec: ParameterShard, server: int, reader: int, buffers: BufferPool, codec_state: State) -> None:
        self.spec = spec
        """Which part of the model the shard is."""
        self.server = server
        """Rank of its server."""
        self.reader = reader
        """Rank from which its values come: that of its copy, if it has one and is not held here."""
        self.buffers = buffers
        """Memory for pushes."""
        self.codec_state = codec_state
        """What the codec keeps between pushes (error feedback)."""
        # What the model holds, and what was asked for.
        self.version = 0
        """Version that the model holds."""
        self.clock = 0
        """Number of pushes so far, skipped iterations included."""
        self.pending_pull: Work | None = None
        """The push whose reply brings a newer version; None if none was asked for."""
        # The memory of pulls, which `allocate` makes.
        self.received: Tensor | None = None
        """Where pulled values arrive; None in a dry run."""
        self.targets: list[Tensor] = []
        """The model's parameters, as flat views of the elements that the shard holds."""
        self.sources: list[Tensor] = []
        """The same elements in `received`."""
        self.reply: ReplyHeader | None = None
        """The last reply."""
        self.lost: ReplyHeader | None = None
        """The reply of the server on this rank to the next pull, once it will make no newer version."""
        self.local_reply: Signal | None = None
        """Set when the server of the worker's own rank replies, while a pull waits for that."""

    def allocate(self, bucket: Bucket) -> None:
        """Make memory for pulled values, and views to copy them into the model."""
        self.received = torch.empty(self.spec.numel, dtype=bucket.flat.dtype, device="cpu")
        for segment in self.spec.segments:
            # A flat view of the parameter itself, [numel]: copying into it changes the model.
            parameter = in_memory_order(bucket.slots[segment.slot_index].tensor)
            self.targets.append(parameter[segment.start : segment.stop])
            self.sources.append(self.received[segment.shard_range])

    def receive_buffer(self) -> Tensor:
        """Return the memory that pulled values are received into, as bytes; in a dry run, any buffer of that size."""
        return self.buffers.take() if self.received is None else self.received.view(torch.uint8)

    def copy_to_model(self) -> None:
        """Copy received values into the model's parameters."""
        if self.targets:
            with torch.no_grad():
                # One fused call for all segments.
                torch._foreach_copy_(self.targets, self.sources)


def make_worker_shard(
    shard: ParameterShard, replica: Replica, config: ServerGroupConfig, rank: int, local_server: Server | None
) -> WorkerShard:
    """Return the state of a shard on the worker of `rank`; `local_server` is that of the same rank, if it serves."""
    bucket, codec = replica.buckets[shard.bucket_index], config.codec
    server = config.server_of(shard)
    copy = config.copy_of(shard)
    if local_server is not None and server == rank:
        buffers = local_server.buffers(shard.index)  # Shared, because that server takes pushed buffers over.
    else:
        buffers = BufferPool(shard.num_bytes, bucket.flat)
    codec_state: State = {}
    if codec is not None and shard.groups is not None and not replica.sizes_only:
        # Another seed for every rank and shard: codecs that draw random numbers must not draw the same everywhere.
        codec_state = codec.start(shard.numel, seed=rank * 65_537 + shard.index)
    reader = server if copy is None or server == rank else copy
    worker_shard = WorkerShard(shard, server, reader, buffers, codec_state)
    if not replica.sizes_only:
        worker_shard.allocate(bucket)
    return worker_shard
