"""The loops of codecs, for every kind of device: compiled for the CPU, in Triton for CUDA, in torch for all others.

Each module has the same functions. They work on flat float32 tensors, and what they promise of NaN and infinity is
in `tutti.codecs.base`.
"""

from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from tutti.codecs.scale_groups import GroupTable


class Kernels(Protocol):
    """What each module has."""

    def onebit_encode(
        self, values: Tensor, residual: Tensor | None, table: GroupTable, scales: Tensor, codes: Tensor
    ) -> None:
        """Fill in two means and the bits of every run; a value above zero has bit 1, from the lowest on."""
        ...

    def onebit_decode(self, codes: Tensor, scales: Tensor, table: GroupTable, out: Tensor, add: bool) -> None: ...

    def quantize_encode(
        self,
        values: Tensor,
        residual: Tensor | None,
        table: GroupTable,
        bits: int,
        seed: int,
        scales: Tensor,
        codes: Tensor,
    ) -> None:
        """Fill in the largest magnitude of every run, and the values over it, rounded to one of few levels.

        At random; with a residual to the nearest, because what is repaired later need not be right on average, and
        what is random could make the residual grow.
        """
        ...

    def quantize_decode(
        self, codes: Tensor, scales: Tensor, table: GroupTable, bits: int, out: Tensor, add: bool
    ) -> None: ...

    def cast_encode(self, values: Tensor, residual: Tensor | None, codes: Tensor) -> None:
        """Fill in the values as numbers of the dtype of `codes`."""
        ...

    def fp8_encode(
        self, values: Tensor, residual: Tensor | None, table: GroupTable, scales: Tensor, codes: Tensor
    ) -> None:
        """Fill in the largest magnitude of every run, and the values over it as e4m3 that goes up to 448."""
        ...

    def fp8_decode(self, codes: Tensor, scales: Tensor, table: GroupTable, out: Tensor, add: bool) -> None: ...

    def pick(self, values: Tensor, residual: Tensor | None, at_least: float) -> tuple[Tensor, Tensor]:
        """Add `values` to the residual, if there is one; the indices, in order, where that is large, and what is there.

        Large is a magnitude of `at_least` that is not zero; NaN is more than any number. Where it is not finite, the
        residual stays as it was.
        """
        ...

    def draw(self, numel: int, count: int, seed: int, device: torch.device) -> Tensor:
        """One place in each of `count` nearly equal stretches of `numel` elements; the seed tells which."""
        ...


@cache
def for_device(device: torch.device) -> Kernels:
    """The functions for tensors of this device."""
    if device.type == "cpu":
        from tutti.codecs.kernels import cpu  # Costs a compiler's import.

        return cpu
    if device.type == "cuda":
        from tutti.codecs.kernels import cuda

        return cuda
    from tutti.codecs.kernels import reference

    return reference
