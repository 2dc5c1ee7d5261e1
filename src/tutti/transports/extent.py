"""A tensor of which only the size matters: what travels where nothing is computed."""

from typing import Self

import torch


class Extent:
    """A run of elements without values. Slices have lengths, sums cost nothing and change nothing.

    It stands in for a flat tensor on device "meta", on which torch's own operations take far longer than a simulated
    message may.
    """

    __slots__ = ("_numel", "dtype", "itemsize", "nbytes")

    is_meta = True
    is_cuda = False
    device = torch.device("meta")

    def __init__(self, numel: int, dtype: torch.dtype, itemsize: int) -> None:
        self._numel = numel
        self.dtype = dtype
        self.itemsize = itemsize
        self.nbytes = numel * itemsize

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Extent":
        return cls(tensor.numel(), tensor.dtype, tensor.itemsize)

    def numel(self) -> int:
        return self._numel

    def __len__(self) -> int:
        return self._numel

    def __getitem__(self, part: slice) -> "Extent":
        start, stop, _ = part.indices(self._numel)
        return Extent(max(0, stop - start), self.dtype, self.itemsize)

    def add_(self, other: object) -> Self:
        return self

    __iadd__ = mul_ = div_ = copy_ = add_

    def zero_(self) -> Self:
        return self

    def detach(self) -> Self:
        return self
