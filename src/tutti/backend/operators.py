"""Reduce operators and the dtypes they take: the same as Gloo's, bit for bit.

AVG takes integers too, which Gloo refuses: Lightning averages them on every backend that is not called "gloo".
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.errors import ConfigError

# Without int16, which Gloo cannot reduce.
_INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
_BITS = (*_INTEGERS, torch.bool)
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_COMPLEX = (torch.complex64, torch.complex128)


@dataclass(frozen=True)
class ReduceOperator:
    """An operator that reduces tensors, two at a time."""

    name: str
    """Its name in `torch.distributed.ReduceOp`."""
    apply: Callable[[Tensor, Tensor, Tensor], object]
    """Called with the local tensor, the received one, and the output, which may be one of the two."""
    dtypes: tuple[torch.dtype, ...]
    """The dtypes it takes."""
    averages: bool = False
    """Whether the result is divided by the number of ranks."""

    def accumulate(self, tensor: Tensor, received: Tensor) -> None:
        """Reduce `received` into `tensor`."""
        self.apply(tensor, received, tensor)

    def finish(self, flat: Tensor, size: int, dtype: torch.dtype) -> None:
        """Turn the reduction of `size` tensors of `dtype` into the result, in place."""
        if self.averages and dtype in _INTEGERS:
            flat.div_(size, rounding_mode="trunc")  # As NCCL, and as Lightning, which sums and divides on Gloo.
        elif self.averages:
            result = torch.view_as_complex(flat.view(-1, 2)) if dtype.is_complex else flat
            result.div_(size)


def _add(local: Tensor, received: Tensor, out: Tensor) -> None:
    torch.add(local, received, out=out)


def _multiply(local: Tensor, received: Tensor, out: Tensor) -> None:
    torch.mul(local, received, out=out)


def _minimum(local: Tensor, received: Tensor, out: Tensor) -> None:
    torch.where(received < local, received, local, out=out)  # Not torch.minimum, which returns NaN if either is.


def _maximum(local: Tensor, received: Tensor, out: Tensor) -> None:
    # As in `_minimum`, the local value is kept where a comparison with NaN is false.
    torch.where(local < received, received, local, out=out)


def _and(local: Tensor, received: Tensor, out: Tensor) -> None:
    torch.bitwise_and(local, received, out=out)


def _or(local: Tensor, received: Tensor, out: Tensor) -> None:
    torch.bitwise_or(local, received, out=out)


def _xor(local: Tensor, received: Tensor, out: Tensor) -> None:
    torch.bitwise_xor(local, received, out=out)


_NUMBERS = (*_FLOATS, *_BITS)

REDUCE_OPERATORS = {
    operator.name: operator
    for operator in (
        ReduceOperator("SUM", _add, (*_NUMBERS, *_COMPLEX)),
        ReduceOperator("AVG", _add, (*_FLOATS, *_INTEGERS, *_COMPLEX), averages=True),
        ReduceOperator("PRODUCT", _multiply, _NUMBERS),
        ReduceOperator("MIN", _minimum, _NUMBERS),
        ReduceOperator("MAX", _maximum, _NUMBERS),
        ReduceOperator("BAND", _and, _BITS),
        ReduceOperator("BOR", _or, _BITS),
        ReduceOperator("BXOR", _xor, _BITS),
    )
}
"""The operators by torch's names."""


def reduce_operator(op: Any, dtype: torch.dtype, world_rank: int) -> ReduceOperator:
    """Return the operator for torch's `op`, or raise `ConfigError` if it is unknown or does not take `dtype`."""
    # Torch's options hold a `ReduceOp`, which wraps the enumeration that has the name.
    name = getattr(op, "op", op).name
    if name not in REDUCE_OPERATORS:
        raise ConfigError(
            f"rank {world_rank}: backend 'tutti' has no ReduceOp.{name}; neither has Gloo, which raises RuntimeError. "
            f"It has {', '.join(REDUCE_OPERATORS)}."
        )
    operator = REDUCE_OPERATORS[name]
    if dtype not in operator.dtypes:
        takes = ", ".join(str(dtype).removeprefix("torch.") for dtype in operator.dtypes)
        raise ConfigError(
            f"rank {world_rank}: ReduceOp.{name} does not take {dtype} tensors in backend 'tutti'; Gloo refuses them "
            f"too. It takes {takes}: convert first."
        )
    return operator
