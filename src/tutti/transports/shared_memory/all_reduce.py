"""The all-reduce in shared memory: each rank sums one slice of all ranks' data, in place.

How it works
------------
Reductions are numbered, alike on all ranks, as all start the same ones in the same order. Each rank has two counters,
which only it writes: `ready` (it has published its data for so many reductions) and `done` (it has summed and written
back its slice of so many). A reduction goes through these steps on each rank:

1. *Post*: write an entry (length, dtype, position, weight) and publish `ready = index + 1`. From now on the peers may
   read and overwrite this rank's tensor.
2. *Sum*, when all ranks are ready: compare the entries, sum this rank's slice over all ranks, write the result into all
   ranks' tensors, and publish `done = index + 1`.
3. *Finish*, when all ranks are done: every slice of this rank's tensor holds the result.

Nothing else is synchronised. Publishing is a release and reading a counter an acquire, so data written before a
counter is seen by a rank that sees the counter. Slices are cut at cache lines and have one writer each, so all ranks
get the same bits. A rank that is early posts several reductions; whenever it posts or polls, it sums those that
everybody is ready for (`_sum_ready`), in order, without waiting. At most `NUM_ENTRIES` are in progress: before an
entry is written over, its reduction is finished on all ranks.

A tensor outside shared memory is copied through a staging buffer, piece by piece, one reduction each.

If the entries differ, every rank finds the same difference and raises the same error. Waits are in `ChannelLiveness`:
they end when a rank is lost, after the timeout, or when this rank closes the channel.
"""

import ctypes
import math
from collections import deque
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from tutti.errors import ConfigError, DifferentCalls, ReplicaMismatch, WeightRefused
from tutti.transports.base import CompletedWork, Work
from tutti.transports.membership import Membership
from tutti.transports.shared_memory.counters import NUM_ENTRIES, RankCounters
from tutti.transports.shared_memory.liveness import ChannelLiveness
from tutti.transports.shared_memory.reduction import KERNELS, combine
from tutti.transports.shared_memory.segments import Segment, SharedSegments

STAGING_BYTES = 4 * 2**20
"""Size of the buffer through which tensors go that are not in shared memory."""
_LINE_BYTES = 64

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool,
)  # fmt: skip


class _ReductionPlan:
    """Where a tensor lies in every rank's memory, and which slice of it this rank sums. Made once per tensor."""

    def __init__(self, segment: Segment, address: int, tensor: Tensor, rank: int, size: int) -> None:
        offset = address - segment.start
        # All ranks have the tensor at the same offset of their own memory: `empty` is collective.
        self.addresses = segment.bases + offset
        # Segment number above, offset below: no segment is longer than 2^48 bytes.
        self.position = (segment.number << 48) + offset  # The same number on all ranks, if they reduce the same tensor.
        self.dtype = tensor.dtype
        self.dtype_code = _DTYPES.index(tensor.dtype)
        self.numel = tensor.numel()
        self.num_bytes = tensor.nbytes
        self.start, self.stop = _slice(self.numel, tensor.itemsize, rank, size)
        self.kernel = KERNELS.get(tensor.dtype)

    def reduce(self, weights: np.ndarray, divisor: float) -> None:
        """Replace this rank's slice, in all ranks' memory, by the weighted sum over ranks divided by `divisor`."""
        # A short tensor has fewer lines than there are ranks.
        if self.start == self.stop:
            return
        if self.kernel is not None:
            self.kernel(self.addresses, self.addresses, self.start, self.stop, weights, divisor)
        else:
            combine([self._view(int(address)) for address in self.addresses], weights.tolist(), divisor)

    def _view(self, address: int) -> Tensor:
        raw = (ctypes.c_char * self.num_bytes).from_address(address)
        return torch.frombuffer(raw, dtype=self.dtype)[self.start : self.stop]


def _slice(numel: int, itemsize: int, rank: int, size: int) -> tuple[int, int]:
    """Rank's share of `numel` elements, cut at cache lines so that no two ranks write the same line."""
    line = max(1, _LINE_BYTES // itemsize)
    # Whole lines per rank, rounded up: the last ranks may get fewer elements, or none.
    share = -(-numel // (size * line)) * line
    return min(rank * share, numel), min((rank + 1) * share, numel)


class _SharedMemoryReduction(Work):
    """One all-reduce in progress, number `index` of its channel."""

    def __init__(self, reductions: "SharedMemoryReductions", index: int, plan: _ReductionPlan, averaged: bool) -> None:
        self._reductions = reductions
        self.index = index
        self.plan = plan
        self.averaged = averaged

    def done(self) -> bool:
        return self._reductions.finished(self.index)

    def wait(self) -> None:
        self._reductions.finish(self.index)


class SharedMemoryReductions:
    """The all-reduces of one channel on one rank. Used by one thread at a time."""

    def __init__(
        self,
        membership: Membership,
        counters: RankCounters,
        liveness: ChannelLiveness,
        segments: SharedSegments,
        staging: Tensor,
    ) -> None:
        """`staging` is `STAGING_BYTES` of `segments`."""
        self._membership, self._counters, self._flags = membership, counters, counters.flags
        self._liveness, self._segments = liveness, segments
        self._rank, self._size = membership.rank, membership.size
        # Filled anew by every reduction; kept, so that a reduction allocates nothing.
        self._weights = np.ones(self._size)
        self._plans: dict[tuple[int, int, torch.dtype], _ReductionPlan] = {}
        self._staging = staging
        self._num_posted = 0
        self._pending: deque[_SharedMemoryReduction] = deque()  # Posted here, this rank's slice not summed yet.
        self.reduced_bytes = 0
        """Bytes of this rank's tensors that were reduced."""

    def close(self) -> None:
        """Drop the references to shared memory."""
        self._pending.clear()
        self._plans.clear()
        self._staging = torch.empty(0, dtype=torch.uint8)

    def reduce(self, tensor: Tensor, weight: float, averaged: bool) -> Work:
        """Start replacing `tensor` by its weighted sum over ranks, or weighted mean if `averaged`."""
        if self._liveness.closed:
            raise ConfigError(f"rank {self._membership.world_rank}: this transport is closed.")
        plan = self._plan(tensor) if tensor.is_contiguous() else None
        if plan is None:
            return self._reduce_staged(tensor, weight, averaged)
        return self._post(plan, tensor.numel(), weight, averaged)

    def finished(self, index: int) -> bool:
        """Whether reduction `index` is done on all ranks. Sums what is ready meanwhile."""
        self._sum_ready()
        return self._flags.reached(self._counters.done, index + 1)

    def finish(self, index: int) -> None:
        """Wait until reduction `index`, and so all before it, is done on all ranks."""
        while self._pending and self._pending[0].index <= index:
            # This rank's slices come first: the peers cannot finish before it has summed them.
            self._liveness.await_reductions(self._counters.ready, self._pending[0].index + 1)
            self._sum_slice(self._pending.popleft())
        self._liveness.await_reductions(self._counters.done, index + 1)

    def _reduce_staged(self, tensor: Tensor, weight: float, averaged: bool) -> Work:
        """Reduce a tensor that peers cannot read, through the staging buffer."""
        # A view of a contiguous tensor, otherwise a copy.
        flat = tensor.reshape(-1)
        stage = self._staging.view(tensor.dtype)
        # An empty tensor gives one empty piece, so that this rank takes part and lengths are compared.
        for piece in flat.split(stage.numel()):
            shared = stage[: piece.numel()]
            shared.copy_(piece)
            # Entries hold `flat.numel()`, not the piece's length: ranks that differ find out at the first piece.
            plan = self._plan(shared)
            assert plan is not None
            self._post(plan, flat.numel(), weight, averaged).wait()  # The staging buffer is used again for the next.
            piece.copy_(shared)
        if flat.data_ptr() != tensor.data_ptr():  # `reshape` copied it.
            tensor.copy_(flat.view(tensor.shape))
        return CompletedWork()

    def _plan(self, tensor: Tensor) -> _ReductionPlan | None:
        """The plan for `tensor`; None if it does not lie in shared memory."""
        # A tensor of no elements has no address; it still takes part, so that its length is compared with the peers'.
        key = (tensor.data_ptr() or self._staging.data_ptr(), tensor.numel(), tensor.dtype)
        if (plan := self._plans.get(key)) is not None:
            return plan
        segment = self._segments.find(key[0])
        if segment is None:
            return None
        plan = self._plans[key] = _ReductionPlan(segment, key[0], tensor, self._rank, self._size)
        finalize(segment, self._plans.pop, key, None)  # Another segment may get the same addresses later.
        return plan

    def _post(self, plan: _ReductionPlan, numel: int, weight: float, averaged: bool) -> _SharedMemoryReduction:
        """Publish this rank's part of the next reduction."""
        index = self._num_posted
        if index >= NUM_ENTRIES:
            self.finish(index - NUM_ENTRIES)  # Its entry is about to be written over.
        self.reduced_bytes += plan.num_bytes
        work = _SharedMemoryReduction(self, index, plan, averaged)
        self._pending.append(work)
        self._num_posted = index + 1
        entry = self._counters.local_entry(index)
        # The second number also tells sums from means: ranks that ask for different ones must not be mixed.
        self._flags.write_entry(entry, (numel, 2 * plan.dtype_code + averaged, plan.position), weight)
        # Last: a rank that sees this counter may read the entry and the data, and overwrite the data.
        self._flags.publish(self._counters.local_ready, index + 1)
        self._sum_ready()
        return work

    def _sum_ready(self) -> None:
        """Sum the slices of all reductions that every rank is ready for, without waiting."""
        while self._pending and self._flags.reached(self._counters.ready, self._pending[0].index + 1):
            self._sum_slice(self._pending.popleft())

    def _sum_slice(self, work: _SharedMemoryReduction) -> None:
        """Sum this rank's slice of all ranks' tensors, and write the result to all of them."""
        # All ranks read the same entries, so all of them refuse, or none does.
        # Safe to read: every rank's `ready` counter was seen, and its entry was written before that.
        divisor = self._flags.read_weights(self._counters.entries(work.index), self._weights)
        if math.isnan(divisor):
            raise self._refusal(work.index)
        work.plan.reduce(self._weights, divisor if work.averaged else 1.0)
        # Releases the results that were just written to the peers' memory.
        self._flags.publish(self._counters.local_done, work.index + 1)

    def _refusal(self, index: int) -> Exception:
        """Why reduction `index` cannot be done: the same error on every rank."""
        rows = self._counters.entry_values(index)
        weights = rows[:, 3].copy().view(np.float64)
        # A weight that no rank gives to data: that rank is in a call of its job, and others are elsewhere.
        if (weights <= -(2.0**20)).any():
            return DifferentCalls(weights.tolist())
        # All ask for the same thing, so NaN came from a weight. Its float64 bits lie in an int64 slot.
        if (rows[:, :3] == rows[0, :3]).all():
            bad = np.flatnonzero(np.isnan(weights)).tolist()
            return WeightRefused(self._membership.world_ranks[rank] for rank in bad)
        asked = [
            f"rank {peer.rank}: {numel} × {_DTYPES[kind // 2]} at {position >> 48}:{position & (1 << 48) - 1}"
            for peer, (numel, kind, position, _) in zip(self._membership.peers, rows.tolist(), strict=True)
        ]
        return ReplicaMismatch(
            f"rank {self._membership.world_rank}: all-reduce of tensors that differ in length, dtype or place in "
            f"shared memory: {'; '.join(asked)}."
        )
