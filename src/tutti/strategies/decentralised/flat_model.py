"""A model in one piece of memory: what peers mix, send and average."""

from typing import cast

import torch
from torch import Tensor

from tutti.replica import Bucket, Replica
from tutti.simulation.sizes import SizeOnlyTensor

_LINE_BYTES = 64


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _LINE_BYTES) * _LINE_BYTES


class Images:
    """Where in such memory each bucket's parameters or statistics lie, and the other buffers behind them.

    Memory is bytes on the CPU; where there are sizes alone, it is only as long.
    """

    def __init__(self, replica: Replica) -> None:
        self.buckets: list[Bucket] = list(replica.buckets)
        self.sizes_only = replica.sizes_only
        self._starts: list[int] = []
        self.num_bytes = 0
        """Of parameters and statistics."""
        for bucket in self.buckets:
            self._starts.append(self.num_bytes)
            self.num_bytes += _aligned(bucket.flat.nbytes)
        averaged = {id(slot.tensor) for slot in replica.statistics}
        self._others = [each for each in replica.model.buffers() if id(each) not in averaged]
        self._num_other_bytes = sum(_aligned(each.nbytes) for each in self._others)

    @property
    def num_meeting_bytes(self) -> int:
        """Of the same and all other buffers."""
        return self.num_bytes + self._num_other_bytes

    def room(self, num_bytes: int | None = None) -> Tensor:
        """Memory, of the model's size unless another is said; its content is nothing yet."""
        wanted = self.num_bytes if num_bytes is None else num_bytes
        if self.sizes_only:
            return cast(Tensor, SizeOnlyTensor(wanted, torch.uint8, 1))
        return torch.zeros(wanted, dtype=torch.uint8, device="cpu")

    def copy(self, memory: Tensor) -> Tensor:
        return memory if self.sizes_only else memory.clone()

    def parts(self, memory: Tensor) -> list[Tensor]:
        """Each bucket's values in such memory; none where there are sizes alone."""
        if self.sizes_only:
            return []
        places = zip(self._starts, self.buckets, strict=True)
        return [memory[at : at + bucket.flat.nbytes].view(bucket.flat.dtype) for at, bucket in places]

    @torch.no_grad()
    def read(self, memory: Tensor) -> Tensor:
        """Let memory hold what the model has now."""
        for bucket, part in zip(self.buckets, self.parts(memory), strict=not self.sizes_only):
            for view, slot in zip(bucket.views(part), bucket.slots, strict=True):
                view.copy_(slot.tensor.detach())
        return memory

    @torch.no_grad()
    def change(self, base: Tensor) -> Tensor:
        """What the model has now, less what `base` holds."""
        change = self.read(self.room())
        for part, before in zip(self.parts(change), self.parts(base), strict=True):
            part.sub_(before)
        return change

    @torch.no_grad()
    def write(self, memory: Tensor) -> None:
        """Let the model have what memory holds."""
        for bucket, part in zip(self.buckets, self.parts(memory), strict=not self.sizes_only):
            for view, slot in zip(bucket.views(part), bucket.slots, strict=True):
                slot.tensor.detach().copy_(view)

    def for_meeting(self, memory: Tensor) -> Tensor:
        """A copy of memory, with the other buffers behind it."""
        whole = self.room(self.num_meeting_bytes)
        if not self.sizes_only:
            whole[: self.num_bytes] = memory
            at = self.num_bytes
            for buffer in self._others:
                whole[at : at + buffer.nbytes] = buffer.detach().cpu().reshape(-1).view(torch.uint8)
                at += _aligned(buffer.nbytes)
        return whole

    @torch.no_grad()
    def take_meeting(self, whole: Tensor) -> None:
        """Let the model have what a meeting came to."""
        if self.sizes_only:
            return
        self.write(whole[: self.num_bytes])
        at = self.num_bytes
        for buffer in self._others:
            values = whole[at : at + buffer.nbytes].view(buffer.dtype)
            buffer.copy_(values.view(buffer.shape))
            at += _aligned(buffer.nbytes)

    @torch.no_grad()
    def average(self, brought: list[Tensor]) -> Tensor:
        """The mean of what ranks brought to a meeting, in their order; other buffers are the first one's."""
        result = self.copy(brought[0])
        if self.sizes_only:
            return result
        everyones = [self.parts(each) for each in brought]
        for number, mean in enumerate(self.parts(result)):
            wide = torch.complex128 if mean.is_complex() else torch.float64
            total = torch.zeros(mean.numel(), dtype=wide)
            for parts in everyones:
                total += parts[number]
            mean.copy_(total / len(brought))
        return result
