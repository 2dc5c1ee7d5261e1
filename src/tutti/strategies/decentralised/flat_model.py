"""A model's values as one block of bytes, which peers mix, send and average."""

from typing import cast

import torch
from torch import Tensor

from tutti.replica import Bucket, Replica
from tutti.simulation.sizes import SizeOnlyTensor

_ALIGNMENT_BYTES = 64


def align(num_bytes: int) -> int:
    """Round up to whole cache lines, which are aligned for every dtype."""
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class FlatModel:
    """The layout of a model's values in flat memory, and copies between the two.

    Flat memory is bytes on the CPU: the values of each bucket (parameters, then running statistics), each aligned. A
    *full* block also holds all other buffers behind them. In a dry run memory has a size, but no contents.
    """

    def __init__(self, replica: Replica) -> None:
        self.buckets: list[Bucket] = list(replica.buckets)
        self.sizes_only = replica.sizes_only
        self._starts: list[int] = []
        self.num_bytes = 0
        """Bytes of parameters and running statistics."""
        for bucket in self.buckets:
            self._starts.append(self.num_bytes)
            self.num_bytes += align(bucket.flat.nbytes)
        # Buffers that cannot be averaged, such as counters: a round takes them from the lowest rank.
        averaged = {id(slot.tensor) for slot in replica.statistics}
        self._other_buffers = {
            name: buffer for name, buffer in replica.model.named_buffers() if id(buffer) not in averaged
        }
        self.num_full_bytes = self.num_bytes + sum(align(buffer.nbytes) for buffer in self._other_buffers.values())
        """Bytes of a full block."""

    def empty(self, num_bytes: int | None = None) -> Tensor:
        """Return new flat memory, zeros, of the model's size unless another is given."""
        size = self.num_bytes if num_bytes is None else num_bytes
        if self.sizes_only:
            return cast(Tensor, SizeOnlyTensor(size, torch.uint8, 1))
        # Zeros, since the gaps between aligned buckets are sent as well: they must not hold what lay in memory
        # before.
        return torch.zeros(size, dtype=torch.uint8, device="cpu")

    def copy(self, memory: Tensor) -> Tensor:
        """Return a copy of flat memory."""
        return memory if self.sizes_only else memory.clone()

    def bucket_views(self, memory: Tensor) -> list[Tensor]:
        """Return each bucket's values in flat memory, as views; an empty list in a dry run."""
        if self.sizes_only:
            return []
        return [
            memory[start : start + bucket.flat.nbytes].view(bucket.flat.dtype)
            for start, bucket in zip(self._starts, self.buckets, strict=True)
        ]

    @torch.no_grad()
    def read_model(self, memory: Tensor) -> Tensor:
        """Copy the model's values into flat memory, and return that."""
        # In a dry run there are no views, and nothing is copied.
        for bucket, values in zip(self.buckets, self.bucket_views(memory), strict=not self.sizes_only):
            for view, slot in zip(bucket.views(values), bucket.slots, strict=True):
                # Also copies from the GPU: flat memory is on the CPU.
                view.copy_(slot.tensor.detach())
        return memory

    @torch.no_grad()
    def write_model(self, memory: Tensor) -> None:
        """Copy flat memory into the model."""
        for bucket, values in zip(self.buckets, self.bucket_views(memory), strict=not self.sizes_only):
            for view, slot in zip(bucket.views(values), bucket.slots, strict=True):
                slot.tensor.detach().copy_(view)

    @torch.no_grad()
    def change_since(self, base: Tensor) -> Tensor:
        """Return the model's values minus those of `base`."""
        change = self.read_model(self.empty())
        for values, base_values in zip(self.bucket_views(change), self.bucket_views(base), strict=True):
            values.sub_(base_values)
        return change

    def changes_parameters(self, change: Tensor) -> bool:
        """Whether a change of the model's values, in flat memory, is one of parameters, and not of statistics alone."""
        views = zip(self.buckets, self.bucket_views(change), strict=True)
        return any(bucket.of_parameters and bool(values.any()) for bucket, values in views)

    def named(self, memory: Tensor) -> dict[str, Tensor]:
        """Return the values of parameters and running statistics in flat memory by name, as views."""
        found: dict[str, Tensor] = {}
        for bucket, values in zip(self.buckets, self.bucket_views(memory), strict=not self.sizes_only):
            found |= {slot.name: view for slot, view in zip(bucket.slots, bucket.views(values), strict=True)}
        return found

    def from_named(self, values: dict[str, Tensor]) -> Tensor:
        """Return flat memory with these values, and zeros where there are none."""
        memory = self.empty()
        for name, view in self.named(memory).items():
            if name in values:
                view.copy_(values[name])
        return memory

    def add(self, memory: Tensor, change: Tensor, factor: float = 1.0) -> None:
        """Add a change, times a factor, to flat memory."""
        for values, changes in zip(self.bucket_views(memory), self.bucket_views(change), strict=True):
            values.add_(changes, alpha=factor)

    def own_buffers(self, full: Tensor) -> dict[str, Tensor]:
        """Return the buffers in a full block that are not averaged, by name, as copies."""
        found, start = {}, self.num_bytes
        for name, buffer in self._other_buffers.items() if not self.sizes_only else ():
            values = full[start : start + buffer.nbytes].clone().view(buffer.dtype)
            found[name] = values.view(buffer.shape)
            start += align(buffer.nbytes)
        return found

    def to_full(self, memory: Tensor) -> Tensor:
        """Return a full block: a copy of flat memory, and the model's other buffers behind it."""
        full = self.empty(self.num_full_bytes)
        if not self.sizes_only:
            full[: self.num_bytes] = memory
            start = self.num_bytes
            for buffer in self._other_buffers.values():
                # As bytes, because buffers have different dtypes, and one block holds them all.
                full[start : start + buffer.nbytes] = buffer.detach().cpu().reshape(-1).view(torch.uint8)
                start += align(buffer.nbytes)
        return full

    @torch.no_grad()
    def write_model_full(self, full: Tensor) -> None:
        """Copy a full block into the model and its buffers."""
        if self.sizes_only:
            return
        self.write_model(full[: self.num_bytes])
        start = self.num_bytes
        for buffer in self._other_buffers.values():
            values = full[start : start + buffer.nbytes].view(buffer.dtype)
            buffer.copy_(values.view(buffer.shape))
            start += align(buffer.nbytes)

    @torch.no_grad()
    def average(self, blocks: list[Tensor]) -> Tensor:
        """Return the mean of full blocks; other buffers are those of the first.

        Sums are in float64 and in the order of the list, so the result has the same bits wherever it is computed.
        """
        # Its other buffers stay those of the first block: only bucket views are overwritten below.
        result = self.copy(blocks[0])
        if self.sizes_only:
            return result
        views = [self.bucket_views(block) for block in blocks]
        for index, mean in enumerate(self.bucket_views(result)):
            dtype = torch.complex128 if mean.is_complex() else torch.float64
            # Flat, like the bucket: [numel].
            total = torch.zeros(mean.numel(), dtype=dtype)
            for block_views in views:
                total += block_views[index]
            mean.copy_(total / len(blocks))
        return result
