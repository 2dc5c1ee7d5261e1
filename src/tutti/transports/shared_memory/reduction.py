"""Reduction kernels: sum the same slice of every rank's memory and write the result back to all of them.

How it works
------------
One rank sums each slice, in rank order, so all ranks get the same bits. The kernel goes through the slice in blocks
that fit into the first-level cache. Each byte of a source crosses the memory bus once in, and each byte of a target
once out.

float32 and float64 have compiled kernels, which release Python's global lock. Other dtypes are summed by torch.
Kernels do not synchronise: the caller ensures that all sources are complete and that no other rank writes the slice.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numba import carray, float32, float64, njit, types
from numba.extending import intrinsic
from torch import Tensor

BLOCK = 2048
"""Elements summed at a time: small enough to stay in the first-level cache."""

Kernel = Callable[[np.ndarray, np.ndarray, int, int, np.ndarray, float], None]
"""Called with source addresses, target addresses, first and last element, a weight per source, and a divisor."""


@intrinsic
def _pointer(typing_context, address):  # type: ignore[no-untyped-def]
    """An address as a pointer."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


def _compile(element: types.Float) -> Kernel:
    """Compile the kernel for one element type."""
    addresses_type = types.Array(types.int64, 1, "C")
    weights_type = types.Array(types.float64, 1, "C")

    # The loops have no branches and one output each: that is what lets them vectorise.
    @njit(
        types.void(addresses_type, addresses_type, types.int64, types.int64, weights_type, types.float64),
        nogil=True,
        cache=True,
        # Division by 0 gives inf or NaN as in torch; Python's model would add a branch that raises.
        error_model="numpy",
    )
    def kernel(sources, targets, start, stop, weights, divisor):  # type: ignore[no-untyped-def]
        total = np.empty(BLOCK, element)
        narrow = np.empty(2, element)  # Weight and divisor, rounded to the element type as torch rounds scalars.
        narrow[1] = divisor
        for begin in range(start, stop, BLOCK):
            end = min(begin + BLOCK, stop)
            size = end - begin
            # The first source is copied, not added to 0, which would turn -0.0 into 0.0.
            first = True
            # At least one weight is not 0: `read_weights` turns equal weights, all 0 included, into ones.
            for rank in range(len(sources)):
                if weights[rank] == 0:
                    continue  # Not even read: it may hold NaN.
                narrow[0] = weights[rank]
                weight = narrow[0]
                source = carray(_pointer(sources[rank]), (stop,), element)[begin:end]
                if first:
                    for i in range(size):
                        total[i] = source[i] * weight
                    first = False
                else:
                    for i in range(size):
                        total[i] += source[i] * weight
            rounded_divisor = narrow[1]
            for i in range(size):
                total[i] /= rounded_divisor
            for rank in range(len(targets)):
                target = carray(_pointer(targets[rank]), (stop,), element)[begin:end]
                for i in range(size):
                    target[i] = total[i]

    return kernel


KERNELS: dict[torch.dtype, Kernel] = {torch.float32: _compile(float32), torch.float64: _compile(float64)}


def combine(tensors: Sequence[Tensor], weights: Sequence[float], divisor: float) -> None:
    """Replace every tensor by their weighted sum divided by `divisor`, for dtypes without a kernel.

    float16 and bfloat16 are summed in float32.
    """
    # Rounded once at the end instead of after each addition.
    wide = torch.float32 if tensors[0].dtype in (torch.float16, torch.bfloat16) else tensors[0].dtype
    for begin in range(0, tensors[0].numel(), BLOCK):
        pieces = [tensor[begin : begin + BLOCK] for tensor in tensors]
        total = torch.zeros(pieces[0].shape, dtype=wide, device="cpu")
        counted = [(piece, weight) for piece, weight in zip(pieces, weights, strict=True) if weight]
        for number, (piece, weight) in enumerate(counted):
            scaled = piece if weight == 1 else piece.to(wide) * weight
            if number:
                total += scaled
            else:
                total.copy_(scaled)  # Not added to zero, which would turn -0.0 into 0.0.
        if divisor != 1:
            total /= divisor
        for piece in pieces:
            piece.copy_(total)
