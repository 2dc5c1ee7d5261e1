"""Checks of the arguments of a process group's methods."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tutti.errors import ConfigError


@dataclass(frozen=True)
class ArgumentCheck:
    """Checks arguments for one rank of a group; each check raises `ConfigError`."""

    world_rank: int
    """This rank's number in the whole world, which errors name."""
    size: int
    """Number of ranks in the group."""

    def single(self, argument: Any, what: str) -> list[Any]:
        """Return the one tensor, or list of tensors, for the one device that a rank has, in a list."""
        if isinstance(argument, Tensor):
            return [argument]
        if len(argument) != 1:
            raise ConfigError(
                f"rank {self.world_rank}: {what} in backend 'tutti' takes one tensor a rank, or one list, as Gloo "
                f"does; got {len(argument)}."
            )
        return list(argument)

    def one_per_rank(self, tensors: Sequence[Tensor], what: str, like: Tensor | None = None) -> Sequence[Tensor]:
        """Check that there is a tensor for each rank, each of the length and dtype of `like` if that is given."""
        if len(tensors) != self.size:
            raise ConfigError(
                f"rank {self.world_rank}: {what} needs a tensor for each of {self.size} ranks, got {len(tensors)}."
            )
        for rank, tensor in enumerate(tensors):
            if like is not None and (tensor.numel() != like.numel() or tensor.dtype != like.dtype):
                raise ConfigError(
                    f"rank {self.world_rank}: {what} needs tensors of one length and dtype, {like.numel()} × "
                    f"{like.dtype}; that for rank {rank} is {tensor.numel()} × {tensor.dtype}."
                )
        return tensors

    def full_and_part(self, what: str, full: Tensor, part: Tensor) -> None:
        """Check that `full` has one `part` for each rank."""
        if full.numel() != self.size * part.numel() or full.dtype != part.dtype:
            raise ConfigError(
                f"rank {self.world_rank}: {what} on {self.size} ranks needs the large tensor to be {self.size} times "
                f"the small one, of the same dtype, got {full.numel()} × {full.dtype} and {part.numel()} × "
                f"{part.dtype}."
            )

    def split(self, flat: Tensor, tensor: Tensor, sizes: Sequence[int] | None, which: str) -> list[Tensor]:
        """Split `flat` into a part for each rank, of `sizes` rows of `tensor`, or of equal size without `sizes`."""
        num_rows = tensor.shape[0] if tensor.dim() else 1
        if not sizes:
            if num_rows % self.size:
                raise ConfigError(
                    f"rank {self.world_rank}: all_to_all_single cannot split {num_rows} rows of its {which} among "
                    f"{self.size} ranks evenly; give {which}_split_sizes."
                )
            sizes = [num_rows // self.size] * self.size
        if len(sizes) != self.size or sum(sizes) != num_rows:
            raise ConfigError(
                f"rank {self.world_rank}: {which}_split_sizes must be {self.size} numbers that add up to {num_rows}, "
                f"got {list(sizes)}."
            )
        # Elements per row.
        width = flat.numel() // num_rows if num_rows else 0
        return list(flat.split([width * number for number in sizes]))
