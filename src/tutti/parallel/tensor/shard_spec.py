"""`ShardSpec`: the part of a parameter that each tensor-parallel rank holds."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, placement_types

from tutti.parallel.shards import Shard
from tutti.parallel.tensor.rules import CONVOLUTIONS
from tutti.parallel.tensor.styles import ParallelStyle


@dataclass(frozen=True)
class ShardSpec:
    """The sharding of a parameter: along one dimension, each of `num_blocks` equal blocks by itself."""

    dim: int | None = None
    """The sharded dimension; None if every rank has the whole parameter."""
    num_blocks: int = 1
    """Number of blocks along `dim` that are sharded separately: 3 for queries, keys and values in one matrix."""

    @property
    def placement(self) -> Placement:
        """The same as a placement of DTensor."""
        if self.dim is None:
            return Replicate()
        if self.num_blocks == 1:
            return placement_types.Shard(self.dim)
        return placement_types._StridedShard(self.dim, split_factor=self.num_blocks)

    def place(self, shape: Sequence[int], rank: int, num_ranks: int) -> Shard:
        """Return the place of one rank's shard in a parameter of this shape, which is sharded."""
        assert self.dim is not None
        block_size = shape[self.dim] // self.num_blocks
        # DTensor's own function, so that uneven shards have the sizes that DTensor expects. In 2.9 it is not public.
        size, offset = placement_types.Shard(self.dim)._local_shard_size_and_offset(block_size, num_ranks, rank)
        pieces = tuple((block * block_size + int(offset), int(size)) for block in range(self.num_blocks))
        return Shard(self.dim, tuple(shape), pieces)

    def shard(self, full: Tensor, rank: int, num_ranks: int) -> Tensor:
        """Return the shard of one rank, copied; the tensor itself if it is not sharded."""
        return full if self.dim is None else self.place(full.shape, rank, num_ranks).of(full)

    def full_tensor(self, shards: list[Tensor]) -> Tensor:
        """Return the parameter whose shards, by rank, are given."""
        if self.dim is None:
            return shards[0]
        # `chunk` cuts evenly, which is right here: only even shards have several blocks (`rules.refusal`).
        blocks = [shard.chunk(self.num_blocks, self.dim) for shard in shards]
        return torch.cat([chunks[block] for block in range(self.num_blocks) for chunks in blocks], self.dim)


def shard_specs(module: nn.Module, style: ParallelStyle) -> dict[str, ShardSpec]:
    """Return how each parameter of a layer of this style is sharded, by name."""
    if style in ("colwise", "vocabulary"):
        return {"weight": ShardSpec(0), "bias": ShardSpec(0)}
    if style == "heads":
        return {"weight": ShardSpec(0, 3), "bias": ShardSpec(0, 3)}
    if style == "rowwise":
        # Every rank has the whole bias: it is added once, after the sum over ranks.
        return {"weight": ShardSpec(1), "bias": ShardSpec()}
    assert style == "replicate" or isinstance(module, CONVOLUTIONS)
    return {name: ShardSpec() for name, _ in module.named_parameters(recurse=False)}
