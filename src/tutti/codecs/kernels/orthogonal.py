"""Products and bases of thin matrices, in the same order of operations on every processor.

Ranks compute them each for itself from the same numbers, and must get the same bits: a library would choose another
order for another processor, or for another place in memory.
"""

import numpy as np
import torch
from torch import Tensor

_LEAST = 1e-30


def orthogonalize(matrix: Tensor) -> Tensor:
    """Columns of length one that span what the columns of `matrix` do, or zero where they span less."""
    if matrix.device.type != "cpu":
        return _gram_schmidt(matrix)
    from tutti.codecs.kernels.orthogonal_loops import gram_schmidt

    columns = matrix.T.contiguous().numpy().astype(np.float64)
    gram_schmidt(columns, _LEAST)
    return torch.from_numpy(np.ascontiguousarray(columns.T.astype(np.float32)))


def multiply(p: Tensor, q: Tensor, out: Tensor) -> None:
    """`out` = P Q."""
    if out.device.type != "cpu":
        torch.mm(p, q, out=out)
        return
    from tutti.codecs.kernels.orthogonal_loops import product

    product(p.contiguous().numpy(), q.contiguous().numpy(), out.numpy())


def _gram_schmidt(matrix: Tensor) -> Tensor:
    basis = matrix.double()
    for number in range(basis.shape[1]):
        column = basis[:, number]
        for _ in range(2):
            before = basis[:, :number]
            column -= before @ (before.T @ column)
        norm = column.norm()
        column.copy_(torch.where(norm > _LEAST, column / norm, torch.zeros_like(column)))
    return basis.float()
