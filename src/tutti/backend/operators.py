"""Reduce operators and the dtypes they take: those of Gloo, to the bit."""

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
    """One way to combine two tensors."""

    name: str
    make: Callable[[Tensor, Tensor, Tensor], object]
    """Takes what a rank has, what came from another, and where to put what becomes of them: it may be one of them."""
    dtypes: tuple[torch.dtype, ...]
    averages: bool = False

    def combine(self, mine: Tensor, theirs: Tensor) -> None:
        """Leave the result in the first, which a rank has; the second came from another."""
        self.make(mine, theirs, mine)

    def conclude(self, flat: Tensor, size: int, dtype: torch.dtype) -> None:
        """Make of what `size` ranks' tensors were combined to, which are of `dtype`, what was asked for."""
        if self.averages:
            result = torch.view_as_complex(flat.view(-1, 2)) if dtype.is_complex else flat
            result.div_(size)


def _add(mine: Tensor, theirs: Tensor, out: Tensor) -> None:
    torch.add(mine, theirs, out=out)


def _multiply(mine: Tensor, theirs: Tensor, out: Tensor) -> None:
    torch.mul(mine, theirs, out=out)


def _minimum(mine: Tensor, theirs: Tensor, out: Tensor) -> None:
    torch.where(theirs < mine, theirs, mine, out=out)  # Not torch.minimum, which lets NaN win.


def _maximum(mine: Tensor, theirs: Tensor, out: Tensor) -> None:
    torch.where(mine < theirs, theirs, mine, out=out)


def _and(mine: Tensor, theirs: Tensor, out: Tensor) -> None:
    torch.bitwise_and(mine, theirs, out=out)


def _or(mine: Tensor, theirs: Tensor, out: Tensor) -> None:
    torch.bitwise_or(mine, theirs, out=out)


def _xor(mine: Tensor, theirs: Tensor, out: Tensor) -> None:
    torch.bitwise_xor(mine, theirs, out=out)


_NUMBERS = (*_FLOATS, *_INTEGERS)

OPERATORS = {
    each.name: each
    for each in (
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


def operator(op: Any, dtype: torch.dtype, rank: int) -> ReduceOperator:
    """The operator that torch calls `op`, for tensors of `dtype`."""
    name = getattr(op, "op", op).name
    if name not in OPERATORS:
        raise ConfigError(
            f"rank {rank}: backend 'tutti' has no ReduceOp.{name}; neither has Gloo, which raises RuntimeError. "
            f"It has {', '.join(OPERATORS)}."
        )
    found = OPERATORS[name]
    if dtype not in found.dtypes:
        takes = ", ".join(str(each).removeprefix("torch.") for each in found.dtypes)
        raise ConfigError(
            f"rank {rank}: ReduceOp.{name} does not take {dtype} tensors in backend 'tutti'; Gloo refuses them too. "
            f"It takes {takes}: convert first."
        )
    return found
