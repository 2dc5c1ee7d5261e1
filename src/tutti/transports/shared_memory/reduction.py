"""Add up the same stretch of every rank's memory and put the result back into all of them.

One rank owns each stretch, so all ranks get the same bits; the sum is made once, in rank order, a
cache-sized block at a time: each byte crosses the memory bus once in and once out.
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
"""Takes addresses to read and to write, from where to where, a weight for each that is read, and what to divide by."""


@intrinsic
def _pointer(typing_context, address):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


def _compile(element: types.Float) -> Kernel:
    addresses_type = types.Array(types.int64, 1, "C")
    weights_type = types.Array(types.float64, 1, "C")

    # The loops have no branches and one output each: that is what lets them vectorise.
    @njit(
        types.void(addresses_type, addresses_type, types.int64, types.int64, weights_type, types.float64),
        nogil=True,
        cache=True,
        error_model="numpy",
    )
    def kernel(sources, targets, start, stop, weights, divisor):  # type: ignore[no-untyped-def]
        total = np.empty(BLOCK, element)
        narrow = np.empty(2, element)
        narrow[1] = divisor
        for begin in range(start, stop, BLOCK):
            end = min(begin + BLOCK, stop)
            size = end - begin
            first = True
            for rank in range(len(sources)):
                if weights[rank] == 0:
                    continue
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
            by = narrow[1]
            for i in range(size):
                total[i] /= by
            for rank in range(len(targets)):
                target = carray(_pointer(targets[rank]), (stop,), element)[begin:end]
                for i in range(size):
                    target[i] = total[i]

    return kernel


KERNELS: dict[torch.dtype, Kernel] = {torch.float32: _compile(float32), torch.float64: _compile(float64)}


def combine(tensors: Sequence[Tensor], weights: Sequence[float], divisor: float) -> None:
    """The same for every other dtype, in torch operations: half types are summed in float32."""
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
                total.copy_(scaled)  # Not added to zero: -0.0 stays what it is.
        if divisor != 1:
            total /= divisor
        for piece in pieces:
            piece.copy_(total)
