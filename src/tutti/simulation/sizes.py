"""A tensor of which only the size matters: what travels where nothing is computed."""

from typing import Self

import torch


class SizeOnlyTensor:
    """A run of elements without values. Slices have lengths, sums cost nothing and change nothing.

    It stands in for a flat tensor on device "meta", on which torch's own operations take far longer than a simulated
    message may.
    """

    __slots__ = ("_numel", "_parts", "dtype", "itemsize", "nbytes")

    is_meta = True
    is_cuda = False
    device = torch.device("meta")

    def __init__(self, numel: int, dtype: torch.dtype, itemsize: int) -> None:
        self._numel = numel
        self.dtype = dtype
        self.itemsize = itemsize
        self.nbytes = numel * itemsize
        self._parts: dict[int, SizeOnlyTensor] = {}

    @classmethod
    def like(cls, tensor: "torch.Tensor | SizeOnlyTensor") -> "SizeOnlyTensor":
        """Return a stand-in with the length and dtype of `tensor`."""
        return cls(tensor.numel(), tensor.dtype, tensor.itemsize)

    def is_contiguous(self) -> bool:
        return True

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def is_complex(self) -> bool:
        return self.dtype.is_complex

    def numel(self) -> int:
        return self._numel

    def __len__(self) -> int:
        return self._numel

    def __getitem__(self, part: slice) -> "SizeOnlyTensor":
        start, stop, _ = part.indices(self._numel)
        numel = max(0, stop - start)
        if (same := self._parts.get(numel)) is None:  # Parts of one length are all alike.
            same = self._parts[numel] = SizeOnlyTensor(numel, self.dtype, self.itemsize)
        return same

    def add_(self, other: object) -> Self:
        return self

    __iadd__ = mul_ = div_ = copy_ = add_

    def zero_(self) -> Self:
        return self

    def detach(self) -> Self:
        return self
