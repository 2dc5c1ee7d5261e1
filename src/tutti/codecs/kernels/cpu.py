"""The kernels for CPU tensors: compiled loops, called with the memory of tensors."""

import numpy as np
import torch
from torch import Tensor

from tutti.codecs.kernels import cast_loops, loops, sparse_loops
from tutti.codecs.packet import as_array
from tutti.codecs.scale_groups import GroupTable

_NO_RESIDUAL = np.empty(0, np.float32)
"""Passed where there is no residual, so that compiled kernels have one signature."""


def onebit_encode(values: Tensor, residual: Tensor | None, table: GroupTable, scales: Tensor, codes: Tensor) -> None:
    # A kernel is compiled for each combination of flags when it is first asked for, so that its inner loop has no
    # branches for them. Later calls find it in a cache.
    loops.onebit_encode(residual is not None)(
        as_array(values), _or_empty(residual), *table.arrays, as_array(scales), as_array(codes)
    )


def onebit_decode(codes: Tensor, scales: Tensor, table: GroupTable, out: Tensor, add: bool) -> None:
    loops.onebit_decode(add)(as_array(codes), as_array(scales), *table.arrays, as_array(out))


def quantize_encode(
    values: Tensor, residual: Tensor | None, table: GroupTable, bits: int, seed: int, scales: Tensor, codes: Tensor
) -> None:
    loops.quantize_encode(bits, residual is not None)(
        as_array(values), _or_empty(residual), *table.arrays, np.uint32(seed), as_array(scales), as_array(codes)
    )


def quantize_decode(codes: Tensor, scales: Tensor, table: GroupTable, bits: int, out: Tensor, add: bool) -> None:
    loops.quantize_decode(bits, add)(as_array(codes), as_array(scales), *table.arrays, as_array(out))


def cast_encode(values: Tensor, residual: Tensor | None, codes: Tensor) -> None:
    # The bits as int16, because NumPy has no bfloat16.
    cast_loops.cast_encode(codes.dtype == torch.float16, residual is not None)(
        as_array(values), _or_empty(residual), as_array(codes.view(torch.int16))
    )


def fp8_encode(values: Tensor, residual: Tensor | None, table: GroupTable, scales: Tensor, codes: Tensor) -> None:
    cast_loops.fp8_encode(residual is not None)(
        as_array(values), _or_empty(residual), *table.arrays, as_array(scales), as_array(codes)
    )


def fp8_decode(codes: Tensor, scales: Tensor, table: GroupTable, out: Tensor, add: bool) -> None:
    cast_loops.fp8_decode(add)(as_array(codes), as_array(scales), *table.arrays, as_array(out))


def pick(values: Tensor, residual: Tensor | None, at_least: float) -> tuple[Tensor, Tensor]:
    kernel = sparse_loops.pick(residual is not None)
    # The arrays are short at first and grow if they are full, because fresh memory costs more than the search.
    capacity = values.numel() // 32 + 2 * sparse_loops.BLOCK
    indices, picked = np.empty(capacity, np.int32), np.empty(capacity, np.float32)
    begin = count = 0
    while begin < values.numel():
        # The kernel stopped because its output is nearly full: four times as much, and it goes on from `begin`.
        if begin:
            indices, picked = (
                np.concatenate([full, np.empty(3 * len(full), full.dtype)]) for full in (indices, picked)
            )
        begin, count = kernel(
            as_array(values), _or_empty(residual), np.float32(at_least), begin, count, indices, picked
        )
    return torch.from_numpy(indices[:count]), torch.from_numpy(picked[:count])


def draw(numel: int, count: int, seed: int, device: torch.device) -> Tensor:
    indices = np.empty(count, np.int64)
    if count:
        sparse_loops.draw(numel, seed, indices)
    return torch.from_numpy(indices)


def _or_empty(residual: Tensor | None) -> np.ndarray:
    return _NO_RESIDUAL if residual is None else as_array(residual)
