"""What a group is given: refused, with words, if it cannot be."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tutti.errors import ConfigError


@dataclass(frozen=True)
class Check:
    """For one rank of a group."""

    me: int
    """Its number in the whole world."""
    size: int
    """Of the group."""

    def only(self, given: Any, what: str) -> list[Any]:
        """The one tensor, or list of them, for the one device that a rank has."""
        if isinstance(given, Tensor):
            return [given]
        if len(given) != 1:
            raise ConfigError(
                f"rank {self.me}: {what} in backend 'tutti' takes one tensor a rank, or one list, as Gloo does; got "
                f"{len(given)}."
            )
        return list(given)

    def one_each(self, tensors: Sequence[Tensor], what: str, like: Tensor | None = None) -> Sequence[Tensor]:
        """A tensor for each rank; each like another one, if that is given."""
        if len(tensors) != self.size:
            raise ConfigError(
                f"rank {self.me}: {what} needs a tensor for each of {self.size} ranks, got {len(tensors)}."
            )
        for rank, tensor in enumerate(tensors):
            if like is not None and (tensor.numel() != like.numel() or tensor.dtype != like.dtype):
                raise ConfigError(
                    f"rank {self.me}: {what} needs tensors of one length and dtype, {like.numel()} × {like.dtype}; "
                    f"that for rank {rank} is {tensor.numel()} × {tensor.dtype}."
                )
        return tensors

    def sizes(self, what: str, whole: Tensor, part: Tensor) -> None:
        """A tensor for all ranks, and one for each."""
        if whole.numel() != self.size * part.numel() or whole.dtype != part.dtype:
            raise ConfigError(
                f"rank {self.me}: {what} on {self.size} ranks needs the large tensor to be {self.size} times the small "
                f"one, of the same dtype, got {whole.numel()} × {whole.dtype} and {part.numel()} × {part.dtype}."
            )

    def split(self, flat: Tensor, tensor: Tensor, sizes: Sequence[int] | None, which: str) -> list[Tensor]:
        """A part of `flat` for each rank, of so many rows of `tensor`, or all alike."""
        rows = tensor.shape[0] if tensor.dim() else 1
        if not sizes:
            if rows % self.size:
                raise ConfigError(
                    f"rank {self.me}: all_to_all_single cannot split {rows} rows of its {which} among {self.size} "
                    f"ranks evenly; give {which}_split_sizes."
                )
            sizes = [rows // self.size] * self.size
        if len(sizes) != self.size or sum(sizes) != rows:
            raise ConfigError(
                f"rank {self.me}: {which}_split_sizes must be {self.size} numbers that add up to {rows}, got "
                f"{list(sizes)}."
            )
        width = flat.numel() // rows if rows else 0
        return list(flat.split([width * number for number in sizes]))
