"""Means over ranks of buckets whose gradients a codec compresses.

How it works:

- Every bucket has a `CompressedSum`, which keeps the codec's state (residuals, velocities, low-rank factors).
- Its operation is cut into stages at `STAGE_BOUNDARY`, where a rank has sent something and would only wait. When a
  bucket is started, one more stage of every open bucket is queued, the newest bucket first: its packets leave before
  the sums of earlier buckets are waited for. `flush` queues the stages that are left.
- Operations of a transport run in the order in which they were queued. All ranks queue the same stages in the same
  order, so messages match. Ranks that do not encode yield the same number of boundaries for that reason.
- Where ranks share hosts, they sum in shared memory first. Only the leader of each host encodes, and broadcasts the
  result on its host.
- What a codec has not sent yet belongs to parameters, not to buckets: it moves with them when buckets are cut anew. In
  a checkpoint it is stored by parameter and rank, and other numbers of ranks can take it over (`compressed_state`).
"""

from typing import Any

import torch
from torch import Tensor

from tutti.codecs import Codec
from tutti.collectives import butterfly, native
from tutti.collectives.compressed import STAGE_BOUNDARY, CompressedSum, ReductionContext, compressed_sum_for
from tutti.collectives.hierarchical import broadcast_within, sum_within
from tutti.collectives.mean import weigh
from tutti.replica import Bucket, Replica
from tutti.strategies.compressed_state import (
    CodecMemory,
    collect_sums,
    compressed_slots,
    distribute_to_sums,
    encoding_ranks,
    owed,
)
from tutti.strategies.means import agree_by_messages, start_sharing_weights, when_filled
from tutti.transports import HostsTransport, Transport, Work
from tutti.transports.base import CompletedWork, Operation


class CompressedMean:
    """Averages compressed buckets over ranks in the background; an implementation of `Mean`."""

    def __init__(self, replica: Replica, transport: Transport, codec: Codec) -> None:
        self._replica = replica
        self._transport = transport
        self._codec = codec
        self._within: Transport | None = None
        self._across: Transport | None = transport
        if isinstance(transport, HostsTransport):
            self._within, self._across = transport.within, transport.across
        # For buckets in which nothing is compressed. The butterfly has few rounds and few bytes.
        self._exact_sum = native if isinstance(transport, HostsTransport) else butterfly
        self._sums: dict[Bucket, CompressedSum] = {}
        self._open: list[_StagedWork] = []
        self._num_boundaries = compressed_sum_for(codec).num_boundaries

    def begin(self, weight: float) -> Work:
        self._weights = start_sharing_weights(weight, self._transport)
        return CompletedWork()

    def agree(self, call: int) -> None:
        agree_by_messages(call, self._transport)

    def start(self, bucket: Bucket) -> Work:
        """Queue the first stage of this bucket, and the next stage of every open one before it."""
        operation = when_filled(bucket.flat, self.steps(bucket, self._weights))
        # A bucket in which nothing is compressed is one plain all-reduce, without boundaries.
        opened = _StagedWork(operation, self._num_boundaries if bucket.values.numel() else 0)
        self._open.append(opened)
        self._advance()
        return opened

    def flush(self) -> None:
        while self._open:
            self._advance()

    def _advance(self) -> None:
        """Queue one more stage of every open bucket, the newest first: its packets should leave before others wait."""
        for opened in reversed(self._open):
            opened.advance(self._transport)
        self._open = [opened for opened in self._open if opened.stages_left]

    def finish(self, bucket: Bucket) -> None:
        return None

    def steps(self, bucket: Bucket, weights: Tensor) -> Operation:
        """Return the operation of a bucket, for ranks of these weights. It yields `STAGE_BOUNDARY` between stages."""
        self._follow_buckets()
        return self._steps(bucket, weights)

    def _steps(self, bucket: Bucket, weights: Tensor) -> Operation:
        """Average a bucket over ranks: exactly within hosts, compressed between them."""
        flat, size = bucket.flat, self._transport.size
        # Before anything is summed, because the weights of ranks on one host may differ.
        weigh(flat, weights, self._transport)
        if not bucket.values.numel():
            yield from self._exact_sum.steps(flat, self._transport)
            flat.div_(size)
            return
        if self._within is not None:
            yield from sum_within(flat, self._within)
        if self._across is not None:
            yield from self._compressed(bucket, self._across)
        else:  # As many boundaries as the leader has, so that both queue the same stages in the same order.
            yield from [STAGE_BOUNDARY] * self._num_boundaries
        if self._within is not None:
            yield from broadcast_within(flat, self._within)

    def _compressed(self, bucket: Bucket, across: Transport) -> Operation:
        """Sum the compressed part of a bucket between the ranks that encode. Codecs work in float32."""
        values = wide = bucket.values
        if not values.is_meta:
            self._mark_unsent(bucket)
            # The same tensor where it is float32 already, so that the sum is made in place; else a copy, written back
            # below.
            wide = values.to(torch.float32)
        yield from self._sums[bucket].steps(wide, bucket.exact, across)
        if wide is not values:
            values.copy_(wide)

    def _mark_unsent(self, bucket: Bucket) -> None:
        """Mark parameters as having a gradient if none came in this step but some of an earlier one is not sent yet."""
        if (bucket.has_grad != 0).all():
            return
        for number, (start, slot) in enumerate(compressed_slots(bucket)):
            elements = slice(start, start + slot.tensor.numel())
            # An old gradient that was not zeroed is encoded too, and must not be lost either.
            unsent = [bucket.values, *self._sums[bucket].per_element.values()]
            if not bucket.has_grad[number] and any(flat[elements].any() for flat in unsent):
                bucket.has_grad[number] = 1

    def _follow_buckets(self) -> None:
        """Make a sum for every bucket. When buckets are cut anew, the state moves with the parameters."""
        buckets = [bucket for bucket in self._replica.buckets if bucket.values.numel()]
        if self._across is None or all(bucket in self._sums for bucket in buckets):
            return
        memory = collect_sums(self._sums)
        self._sums = {bucket: self._new_sum(bucket, self._across) for bucket in buckets}
        distribute_to_sums(memory, self._sums)

    def _new_sum(self, bucket: Bucket, across: Transport) -> CompressedSum:
        """Make the sum of a bucket, without state of earlier steps."""
        layout = tuple((start, tuple(slot.tensor.shape)) for start, slot in compressed_slots(bucket))
        # The divisor is the number of all ranks, also where only leaders encode: their hosts' sums are in it.
        device, divisor = bucket.values.device, self._transport.size
        context = ReductionContext(across.rank, across.size, divisor, device, seed=bucket.index)
        return compressed_sum_for(self._codec)(self._codec, layout, bucket.values.numel(), context)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state by parameter, to be gathered from all ranks."""
        self._follow_buckets()
        return collect_sums(self._sums).state_dict(self._codec, self._share)

    def load_state_dict(self, state: dict[str, Any]) -> dict[str, Tensor]:
        """Continue from gathered states, with any number of ranks, other buckets or another codec.

        Returns what the mean is owed that the codec does not take over, the same on every rank: of parameters that are
        not compressed here, or of all if it has no error feedback. What only the codec that saved it understands is
        left out.
        """
        self._follow_buckets()
        ranks = encoding_ranks(self._transport, two_levels=self._within is not None)
        memory = CodecMemory.inherited(state, self._codec, self._share, self._transport.rank, ranks)
        distribute_to_sums(memory, self._sums)
        compressed = [slot.name for bucket in self._replica.buckets for _, slot in compressed_slots(bucket)]
        return owed(state, self._codec, compressed)

    @property
    def _share(self) -> float:
        return 1 / self._transport.size


class _StagedWork(Work):
    """An operation that is queued stage by stage. It is done when all stages are."""

    def __init__(self, operation: Operation, num_boundaries: int) -> None:
        self._operation = operation
        self._stages: list[Work] = []
        self.stages_left = num_boundaries + 1

    def advance(self, transport: Transport) -> None:
        """Queue the next stage on the transport."""
        self.stages_left -= 1
        # The last stage runs the rest of the operation to its end.
        self._stages.append(transport.start(self._up_to_boundary() if self.stages_left else self._operation))

    def _up_to_boundary(self) -> Operation:
        """Run the operation up to its next stage boundary."""
        # Leaving the loop does not end the generator: the next stage continues it.
        for work in self._operation:
            if work is STAGE_BOUNDARY:
                return
            yield work

    def done(self) -> bool:
        return not self.stages_left and all(stage.done() for stage in self._stages)

    def wait(self) -> None:
        assert not self.stages_left, "flush must be called before wait"
        for stage in self._stages:
            stage.wait()
