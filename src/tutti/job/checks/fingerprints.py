"""Fingerprints of tensors: equal for equal bits, and different, but for rare accidents, for any other."""

from collections.abc import Sequence

import torch
from torch import Tensor

_WIDTH = 1024
"""Words in a row of the matrix that a tensor is seen as: positions count by column and by row."""


@torch.no_grad()
def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    """Return a number for each tensor, computed from its bits and their positions."""
    parts = [_parts(tensor.detach()) for tensor in tensors]
    # One transfer for all of them: each would wait for the GPU by itself.
    numbers = torch.stack([part.cpu() for part in parts]).tolist() if parts else []
    return [combined(row) for row in numbers]


def _parts(tensor: Tensor) -> Tensor:
    """Return sums of the tensor's bits as integers, weighted by column and by row. They may wrap around."""
    flat = tensor.contiguous().view(-1)
    num_words = flat.nbytes // 8
    aligned = flat.data_ptr() % 8 == 0 and flat.storage_offset() * flat.itemsize % 8 == 0
    octets = (flat if aligned else flat.clone()).view(torch.uint8)
    # Words of 8 bytes are summed several times as quickly as smaller ones, which torch converts first.
    flat, odd = octets[: num_words * 8].view(torch.int64), octets[num_words * 8 :]
    num_rows = flat.numel() // _WIDTH
    body, rest = flat[: num_rows * _WIDTH].view(num_rows, _WIDTH), flat[num_rows * _WIDTH :]
    columns, rows = body.sum(0, dtype=torch.int64), body.sum(1, dtype=torch.int64)
    return torch.stack([_weighted(columns), _weighted(rows), _weighted(rest), _weighted(odd)])


def _weighted(values: Tensor) -> Tensor:
    return (values * torch.arange(1, values.numel() + 1, device=values.device)).sum(dtype=torch.int64)


def combined(numbers: Sequence[int]) -> int:
    """Return one number of 62 bits for several."""
    mixed = len(numbers)
    for number in numbers:
        mixed = (mixed * 6364136223846793005 + number * 1442695040888963407 + 1) % 2**64
        mixed ^= mixed >> 29
    return mixed % 2**62


@torch.no_grad()
def first_non_finite(tensors: Sequence[Tensor]) -> int | None:
    """Return the index of the first floating-point tensor that has a NaN or an infinity; None if there is none."""
    candidates = [(i, t) for i, t in enumerate(tensors) if t.is_floating_point() and t.numel()]
    if not candidates:
        return None
    # The extremes of a tensor are NaN if any element is. One transfer for all, as above.
    extremes = [torch.stack(torch.aminmax(tensor.detach())).cpu().double() for _, tensor in candidates]
    finite = torch.isfinite(torch.stack(extremes)).all(1).tolist()
    return next((index for (index, _), is_finite in zip(candidates, finite, strict=True) if not is_finite), None)
