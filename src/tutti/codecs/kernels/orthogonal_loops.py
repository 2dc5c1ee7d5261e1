"""Compiled loops of `orthogonal` for the CPU. Nothing in them is reordered (`compiled_in_order`)."""

import numpy as np

from tutti.codecs.kernels.compiled import compiled_in_order


@compiled_in_order
def gram_schmidt(columns, least):  # type: ignore[no-untyped-def]
    """Make the rows of `columns` orthonormal, one after another, in place.

    Each is made orthogonal to those before it twice, because once leaves rounding errors ("twice is enough", Kahan).
    """
    for number in range(len(columns)):
        column = columns[number]
        original_square = 0.0
        for i in range(len(column)):
            original_square += column[i] * column[i]
        for _ in range(2):
            for other in range(number):
                earlier = columns[other]
                overlap = 0.0
                for i in range(len(column)):
                    overlap += earlier[i] * column[i]
                for i in range(len(column)):
                    column[i] -= overlap * earlier[i]
        square = 0.0
        for i in range(len(column)):
            square += column[i] * column[i]
        # A column that the others span leaves only rounding errors, which would become a random direction.
        # 1e-7 is about float32's rounding error relative to the column: the columns were summed in float32.
        norm = np.sqrt(square)
        factor = 0.0 if norm <= max(least, 1e-7 * np.sqrt(original_square)) else 1.0 / norm
        for i in range(len(column)):
            column[i] *= factor


@compiled_in_order
def product(p, q, out):  # type: ignore[no-untyped-def]
    """Store p @ q in `out`, adding the terms of each element in order."""
    rows, rank = p.shape
    columns = q.shape[1]
    for row in range(rows):
        target = out[row]
        weight = p[row, 0]
        first = q[0]
        for i in range(columns):
            target[i] = weight * first[i]
        # Terms outermost: the inner loop runs along memory and vectorises, and no sum is reordered.
        for number in range(1, rank):
            weight = p[row, number]
            other = q[number]
            for i in range(columns):
                target[i] += weight * other[i]
