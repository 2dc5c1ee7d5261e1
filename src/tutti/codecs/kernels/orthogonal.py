"""Orthonormal bases and products of thin matrices, with the same order of operations on every processor.

Every rank computes them from the same numbers, and must get the same bits. A BLAS library would choose another order of
additions for another processor, or for another alignment in memory. On GPUs torch's products are used: there ranks need
GPUs of one kind.
"""

import numpy as np
import torch
from torch import Tensor

_LEAST = 1e-30
"""Columns shorter than this count as zero."""


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns of `matrix`, with zero columns where they are linearly dependent.

    It is computed in float64, so that float32 results are orthogonal to their last bits.
    """
    if matrix.device.type != "cpu":
        return _gram_schmidt(matrix)
    from tutti.codecs.kernels.orthogonal_loops import gram_schmidt

    columns = matrix.T.contiguous().numpy().astype(np.float64)
    gram_schmidt(columns, _LEAST)
    return torch.from_numpy(np.ascontiguousarray(columns.T.astype(np.float32)))


def multiply(p: Tensor, q: Tensor, out: Tensor) -> None:
    """Store the product P Q in `out`."""
    if out.device.type != "cpu":
        torch.mm(p, q, out=out)
        return
    from tutti.codecs.kernels.orthogonal_loops import product

    product(p.contiguous().numpy(), q.contiguous().numpy(), out.numpy())


def _gram_schmidt(matrix: Tensor) -> Tensor:
    """Gram-Schmidt in torch operations. It is applied twice, because once leaves rounding errors."""
    basis = matrix.double()
    for number in range(basis.shape[1]):
        column = basis[:, number]
        for _ in range(2):
            earlier = basis[:, :number]
            # Subtract its projection on the columns before it. `column` is a view of `basis`.
            column -= earlier @ (earlier.T @ column)
        norm = column.norm()
        column.copy_(torch.where(norm > _LEAST, column / norm, torch.zeros_like(column)))
    return basis.float()
