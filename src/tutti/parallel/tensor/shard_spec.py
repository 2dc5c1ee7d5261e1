"""Which piece of a parameter a rank has."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tutti.parallel.tensor.rules import CONVOLUTIONS
from tutti.parallel.tensor.styles import ParallelStyle


@dataclass(frozen=True)
class ShardSpec:
    """A parameter cut along one dimension, each of `parts` equal parts by itself; None is all of it."""

    dim: int | None = None
    parts: int = 1

    @property
    def placement(self) -> Placement:
        if self.dim is None:
            return Replicate()
        return Shard(self.dim) if self.parts == 1 else _StridedShard(self.dim, split_factor=self.parts)

    def of(self, whole: Tensor, rank: int, num_ranks: int) -> Tensor:
        """This rank's piece, in memory of its own."""
        if self.dim is None:
            return whole
        cuts = [Shard.local_shard_size_and_offset(size, num_ranks, rank) for size in self._sizes(whole)]
        starts = [index * size for index, size in enumerate(self._sizes(whole))]
        found = [
            whole.narrow(self.dim, start + int(offset), int(size))
            for start, (size, offset) in zip(starts, cuts, strict=True)
        ]
        return torch.cat(found, self.dim)

    def whole(self, pieces: list[Tensor]) -> Tensor:
        """All ranks' pieces together."""
        if self.dim is None:
            return pieces[0]
        split = [piece.chunk(self.parts, self.dim) for piece in pieces]
        return torch.cat([each[part] for part in range(self.parts) for each in split], self.dim)

    def _sizes(self, whole: Tensor) -> list[int]:
        assert self.dim is not None
        return [whole.shape[self.dim] // self.parts] * self.parts


def shard_specs(module: nn.Module, style: ParallelStyle) -> dict[str, ShardSpec]:
    """By name, how the parameters of a layer are cut that is split in this way."""
    if style in ("colwise", "vocabulary"):
        return {"weight": ShardSpec(0), "bias": ShardSpec(0)}
    if style == "heads":
        return {"weight": ShardSpec(0, 3), "bias": ShardSpec(0, 3)}
    if style == "rowwise":
        return {"weight": ShardSpec(1), "bias": ShardSpec()}
    assert style == "replicate" or isinstance(module, CONVOLUTIONS)
    return {name: ShardSpec() for name, _ in module.named_parameters(recurse=False)}
