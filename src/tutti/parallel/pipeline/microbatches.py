"""Microbatches: equal parts of a batch."""

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from tutti.errors import ConfigError
from tutti.replica.samples import num_rows


def split_batch(batch: Any, num_microbatches: int) -> list[Any]:
    """Return the microbatches of a batch: its tensors, nested or not, are cut alike along their first dimension."""
    rows = num_rows(batch)
    # Of equal size, because the loss of the batch is the plain mean over microbatches.
    if rows % num_microbatches or not rows:
        raise ConfigError(
            f"a batch of {rows} samples does not divide into {num_microbatches} microbatches of equal size. Choose a "
            f"multiple of {num_microbatches} as batch size and drop_last=True, or set Pipeline(microbatches=...)."
        )
    size = rows // num_microbatches
    return [_rows(batch, start, start + size) for start in range(0, rows, size)]


def _rows(batch: Any, start: int, stop: int) -> Any:
    # Slices are views: the microbatches lie in the memory of the batch.
    return tree_map_only(Tensor, lambda tensor: tensor[start:stop], batch)
