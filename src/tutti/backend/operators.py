"""Reduce operators and the dtypes they take: the same as Gloo's, bit for bit."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.errors import ConfigError

_INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool)
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_COMPLEX = (torch.complex64, torch.complex128)


@dataclass(frozen=True)
class ReduceOperator:
    """A way to reduce tensors, two at a time."""

    name: str
    """Its name in `torch.distributed.ReduceOp`."""
    apply: Callable[[Tensor, Tensor, Tensor], object]
    """Called with a rank's own tensor, the one received, and the output, which may be one of the two."""
    dtypes: tuple[torch.dtype, ...]
    """The dtypes it takes."""
    averages: bool = False
    """Whether the result is divided by the number of ranks."""

    def accumulate(self, tensor: Tensor, received: Tensor) -> None:
        """Reduce `received` into `tensor`."""
        self.apply(tensor, received, tensor)

    def finish(self, flat: Tensor, size: int, dtype: torch.dtype) -> None:
        """Turn the reduction of `size` tensors of `dtype` into the result, in place."""
        if self.averages:
            result = torch.view_as_complex(flat.view(-1, 2)) if dtype.is_complex else flat
            result.div_(size)


def _add(own: Tensor, received: Tensor, out: Tensor) -> None:
    torch.add(own, received, out=out)


def _multiply(own: Tensor, received: Tensor, out: Tensor) -> None:
    torch.mul(own, received, out=out)


def _minimum(own: Tensor, received: Tensor, out: Tensor) -> None:
    torch.where(received < own, received, own, out=out)  # Not torch.minimum, which returns NaN if either is.


def _maximum(own: Tensor, received: Tensor, out: Tensor) -> None:
    torch.where(own < received, received, own, out=out)


def _and(own: Tensor, received: Tensor, out: Tensor) -> None:
    torch.bitwise_and(own, received, out=out)


def _or(own: Tensor, received: Tensor, out: Tensor) -> None:
    torch.bitwise_or(own, received, out=out)


def _xor(own: Tensor, received: Tensor, out: Tensor) -> None:
    torch.bitwise_xor(own, received, out=out)


_NUMBERS = (*_FLOATS, *_INTEGERS)

REDUCE_OPERATORS = {
    operator.name: operator
    for operator in (
        ReduceOperator("SUM", _add, (*_NUMBERS, *_COMPLEX)),
        ReduceOperator("AVG", _add, (*_FLOATS, *_COMPLEX), averages=True),
        ReduceOperator("PRODUCT", _multiply, _NUMBERS),
        ReduceOperator("MIN", _minimum, _NUMBERS),
        ReduceOperator("MAX", _maximum, _NUMBERS),
        ReduceOperator("BAND", _and, _INTEGERS),
        ReduceOperator("BOR", _or, _INTEGERS),
        ReduceOperator("BXOR", _xor, _INTEGERS),
    )
}
"""The operators by torch's names."""


def reduce_operator(op: Any, dtype: torch.dtype, world_rank: int) -> ReduceOperator:
    """Return the operator for torch's `op`, or raise `ConfigError` if it is unknown or does not take `dtype`."""
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
