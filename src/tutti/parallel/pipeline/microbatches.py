"""Batches in parts of one size."""

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from tutti.errors import ConfigError
from tutti.replica.samples import num_rows


def split_batch(batch: Any, num_parts: int) -> list[Any]:
    """The microbatches of a batch: nested tensors cut alike along their first dimension."""
    rows = num_rows(batch)
    if rows % num_parts or not rows:
        raise ConfigError(
            f"a batch of {rows} samples does not divide into {num_parts} microbatches of one size. Choose a batch size "
            f"that {num_parts} divides and drop_last=True, or Pipeline(microbatches=...)."
        )
    size = rows // num_parts
    starts = range(0, rows, size)
    return [_rows(batch, start, start + size) for start in starts]


def _rows(batch: Any, start: int, stop: int) -> Any:
    return tree_map_only(Tensor, lambda it: it[start:stop], batch)
