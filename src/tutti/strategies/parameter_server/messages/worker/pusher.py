"""Pushing: packs the gradient of a bucket's shards, sends it, and asks for a newer version where one is needed."""

import numpy as np
import torch
from torch import Tensor

from tutti.events import READ, Event
from tutti.replica import Bucket
from tutti.replica.factors import Pair
from tutti.strategies.parameter_server.messages.buffers import BufferPool
from tutti.strategies.parameter_server.messages.wire import NO_PULL, RequestHeader, RequestKind
from tutti.strategies.parameter_server.messages.worker.context import WorkerContext
from tutti.strategies.parameter_server.messages.worker.puller import ShardPuller
from tutti.strategies.parameter_server.messages.worker.requests import RequestSender
from tutti.strategies.parameter_server.messages.worker.shard import WorkerShard
from tutti.strategies.parameter_server.shards import ParameterShard
from tutti.strategies.parameter_server.staleness_bound import staleness_bound
from tutti.strategies.parameter_server.sufficient_factors import concatenate, matrix_shapes, pack
from tutti.strategies.parameter_server.worker import gradient_flags
from tutti.transports.base import Operation


class ShardPusher:
    """Pushes the shards of buckets; each push may carry the request for a pull."""

    def __init__(self, context: WorkerContext, requests: RequestSender, puller: ShardPuller) -> None:
        self._context = context
        self._replica = context.replica
        self._config = context.config
        self._transport = context.transport
        self._requests = requests
        self._puller = puller

    def push(
        self,
        shards: list[WorkerShard],
        bucket: Bucket,
        weight: float,
        norm: float,
        options: np.ndarray,
        is_void: bool = False,
    ) -> None:
        """Push all shards of a bucket. Returns at once: the sends, and the pulls after them, go on in the background.

        Args:
            shards: the shards of the bucket.
            bucket: holds the gradients; they are copied, and may change when this returns.
            weight: number of samples that the gradients are the mean of.
            norm: norm of the whole gradient, where each update is clipped by itself; else 0.
            options: numeric options of the optimiser.
            is_void: push no gradient, but count the iteration.
        """
        bound = self._config.consistency.bound
        synchronous = int(self._replica.starts_synchronously)
        sizes_only = self._replica.sizes_only
        has_grad = np.ones(len(bucket.slots), bool) if sizes_only else np.array(gradient_flags(bucket))
        for shard in shards:
            spec = shard.spec
            # Residuals of a codec stay as they are if the step is void.
            payload = None if is_void else self._payload(shard, bucket)
            kind, num_bytes = (RequestKind.VOID, 0) if payload is None else (RequestKind.PUSH, payload.nbytes)
            # Computed before `clock` is advanced, as `_wanted_version` expects.
            wanted = self._wanted_version(shard)
            now = self._transport.now()
            self._context.events.record(Event(READ, now, now, 0, (spec.index, shard.clock, shard.version)))
            header = RequestHeader(kind, spec.index, shard.version, wanted, num_bytes, weight, norm, synchronous)
            shard_flags = has_grad[[segment.slot_index for segment in spec.segments]]
            if bound is not None:
                # Adds 1 for the first shard and 0 for the others, so that an iteration counts once.
                self._context.staleness[shard.clock - shard.version] += spec.index == 0
            # Before the push begins: a server on this rank may reply at once.
            shard.clock += 1
            if wanted != NO_PULL:
                shard.reply = None
            work = self._transport.spawn(self._send(shard, header, options, shard_flags, payload))
            if wanted != NO_PULL:
                shard.pending_pull = work

    def _send(
        self,
        shard: WorkerShard,
        header: RequestHeader,
        options: np.ndarray,
        has_grad: np.ndarray,
        payload: Tensor | None,
    ) -> Operation:
        """Send a push and, if it asks for a newer version, receive that."""
        yield from self._requests.push(shard.server, header, options, has_grad, payload)
        if payload is not None and shard.server != self._transport.rank:
            shard.buffers.give_back(payload)  # A server on this rank gives it back itself, after the step.
        if header.wanted_version != NO_PULL:
            yield from self._puller.receive(shard)

    def _wanted_version(self, shard: WorkerShard) -> int:
        """Return the oldest version to accept as a reply to the next push; `NO_PULL` if no reply is needed.

        Under SSP(s) iteration c + 1 needs version c + 1 - s. Where the model holds exactly that, one version more is
        asked for, as the iteration after will need it: the pull then overlaps a whole iteration.
        """
        consistency = self._config.consistency
        bound = staleness_bound(consistency, self._replica)
        if bound is None:
            # Counting: the server replies when this push is in a version, whatever its number.
            return 0
        needed = shard.clock + 1 - bound
        # Eager: any version newer than the model's, in every iteration.
        if shard.pending_pull is None and consistency.eager and bound:
            return max(needed, shard.version + 1)
        # One pull at a time, and none while the model is ahead of the next iteration's need. Under BSP none ahead of
        # it: the version after `needed` contains this worker's own next push.
        if shard.pending_pull is not None or shard.version > needed or (bound == 0 and shard.version == needed):
            return NO_PULL
        return needed if shard.version < needed else needed + 1

    def _payload(self, shard: WorkerShard, bucket: Bucket) -> Tensor:
        """Return a shard's gradient as bytes. A copy: the bucket's memory is the user's, who may change it at once."""
        spec, codec = shard.spec, self._config.codec
        if codec is not None and spec.groups is not None and not self._replica.starts_synchronously:
            if self._replica.sizes_only:
                return BufferPool(codec.packet_bytes(spec.numel, spec.groups), bucket.flat).take()
            values = bucket.flat[spec.bucket_range].to("cpu", torch.float32)  # Codecs work in float32 on the CPU.
            packet, shard.codec_state = codec.encode(values, shard.codec_state, groups=spec.groups)
            return packet
        if self._config.factors and (packed := self._pack_factors(spec, bucket)) is not None:
            return packed
        buffer = shard.buffers.take()
        if not self._replica.sizes_only:
            buffer.view(bucket.flat.dtype).copy_(bucket.flat[spec.bucket_range])
        return buffer

    def _pack_factors(self, shard: ParameterShard, bucket: Bucket) -> Tensor | None:
        """Return a shard's gradient in factors, or None where they are not smaller."""
        layers = {layer.slot: layer for layer in self._replica.factored}
        pairs: list[Pair | None] = []
        for segment in shard.segments:
            layer = layers.get(bucket.slots[segment.slot_index])
            # The product is laid out row by row, as only a contiguous weight is.
            layer_pairs = layer.pairs if layer is not None and layer.slot.tensor.is_contiguous() else []
            pairs.append(concatenate(layer_pairs) if layer_pairs else None)
        if not any(pair is not None for pair in pairs):
            return None
        return pack(shard, bucket.flat[shard.bucket_range], matrix_shapes(shard, bucket), pairs)
