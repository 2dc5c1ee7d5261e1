"""`SizeOnlyTensor`: a stand-in for a flat tensor in dry runs, where messages have sizes and nothing is computed."""

from typing import Self

import torch


class SizeOnlyTensor:
    """A flat tensor without values: it has a length and a dtype, slices have lengths, sums change nothing.

    It is used in place of tensors on device "meta", on which torch's own operations take far longer than simulating a
    message does. It has the few methods of `Tensor` that collectives and transports call.
    """

    __slots__ = ("_numel", "_slices", "dtype", "itemsize", "nbytes")

    is_meta = True
    is_cuda = False
    device = torch.device("meta")

    def __init__(self, numel: int, dtype: torch.dtype, itemsize: int) -> None:
        self._numel = numel
        self.dtype = dtype
        self.itemsize = itemsize
        self.nbytes = numel * itemsize
        self._slices: dict[int, SizeOnlyTensor] = {}
        """Slices by length: collectives cut the same few lengths over and over."""

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

    def __getitem__(self, index: slice) -> "SizeOnlyTensor":
        start, stop, _ = index.indices(self._numel)
        numel = max(0, stop - start)
        if (piece := self._slices.get(numel)) is None:  # Slices of one length are all alike.
            piece = self._slices[numel] = SizeOnlyTensor(numel, self.dtype, self.itemsize)
        return piece

    def add_(self, other: object) -> Self:
        return self

    __iadd__ = mul_ = div_ = copy_ = add_

    def zero_(self) -> Self:
        return self

    def detach(self) -> Self:
        return self
