"""The inner loops of codecs for every kind of device: compiled for CPUs, in Triton for CUDA, in torch for all others.

The modules `cpu`, `cuda` and `reference` have the functions of `Kernels`. They work on flat float32 tensors. What they
promise of NaN, infinity and residuals is in `tutti.codecs.base`; `reference` is what the others are tested against.

Bit layouts, shared by all of them:

- Codes of b bits are packed 8/b to a byte, the first value in the lowest bits. The codes of every group start on a new
  byte.
- 1-bit: bit 1 stands for a value above zero. Scales are [low mean, high mean] of every group.
- Quantised: with b bits and L = 2^(b-1) - 1, code c stands for (c - L) × largest / L. Codes run from 0 to 2 L.
- fp8: e4m3 without infinity (sign, 4 bits of exponent with bias 7, 3 bits of mantissa). 0x7F is NaN, and 0x7E is 448.
"""

from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from tutti.codecs.scale_groups import GroupTable


class Kernels(Protocol):
    """The functions that every module of kernels has.

    `residual`, if given, is added to the values first and holds the new error afterwards. `table` says where groups
    are.
    """

    def onebit_encode(
        self, values: Tensor, residual: Tensor | None, table: GroupTable, scales: Tensor, codes: Tensor
    ) -> None:
        """Fill in the two means and the bits of every group."""
        ...

    def onebit_decode(self, codes: Tensor, scales: Tensor, table: GroupTable, out: Tensor, add: bool) -> None:
        """Overwrite `out` with each group's low or high mean, or add it."""
        ...

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
        """Fill in the largest magnitude of every group, and each value rounded to one of its levels.

        Rounding is stochastic without a residual, with noise from `seed` and the index. With a residual it is to the
        nearest level (see `Quantize`).
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
        """Fill in the largest magnitude of every group, and the values as e4m3, scaled so that it becomes 448."""
        ...

    def fp8_decode(self, codes: Tensor, scales: Tensor, table: GroupTable, out: Tensor, add: bool) -> None:
        """Overwrite `out` with the scaled e4m3 values, or add them."""
        ...

    def pick(self, values: Tensor, residual: Tensor | None, at_least: float) -> tuple[Tensor, Tensor]:
        """Return the indices, in order, and the values whose magnitude is `at_least` or more, and not zero.

        With a residual, values are added to it first, and the sums count. NaN counts as larger than any number. Where
        the sum is not finite, the residual stays as it was.
        """
        ...

    def draw(self, numel: int, count: int, seed: int, device: torch.device) -> Tensor:
        """Return one random index in each of `count` nearly equal stretches of `numel` elements, by the seed."""
        ...


@cache
def for_device(device: torch.device) -> Kernels:
    """Return the module of kernels for tensors of this device."""
    if device.type == "cpu":
        from tutti.codecs.kernels import cpu  # Imported here, because it imports the compiler.

        return cpu
    if device.type == "cuda":
        from tutti.codecs.kernels import cuda

        return cuda
    from tutti.codecs.kernels import reference

    return reference
