"""`Mesh`: ranks in rows, one row per way of splitting the work."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal, get_args

from tutti.errors import ConfigError
from tutti.parallel.pipeline.settings import Pipeline
from tutti.parallel.tensor.styles import ParallelStyle

Axis = Literal["pipe", "data", "tensor"]

AXES: tuple[Axis, ...] = get_args(Axis)
"""From the one whose neighbours are furthest apart in rank to the one whose neighbours are next to each other."""


@dataclass(frozen=True)
class Mesh:
    """How many ranks split batches, layers, and the sequence of layers.

    Ranks next to each other split layers (`tensor`), which talk most; then come replicas (`data`), which stay together
    by any strategy; furthest apart are the stages of the pipeline (`pipe`), which talk least.

    Args:
        split: by name, or pattern of names such as "blocks.*.mlp.0": how to split a layer that `tutti.tensor_plan`
            would split otherwise, or "replicate".
        pipeline: its schedule and its cut.
    """

    data: int = 1
    tensor: int = 1
    pipe: int = 1
    split: Mapping[str, ParallelStyle] = field(default_factory=dict)
    pipeline: Pipeline = field(default_factory=Pipeline)

    def __post_init__(self) -> None:
        wrong = [f"{axis}={size!r}" for axis, size in self.shape.items() if not isinstance(size, int) or size < 1]
        if wrong:
            raise ConfigError(f"Mesh: {', '.join(wrong)}; every axis needs a whole number of ranks, 1 or more.")
        if not isinstance(self.split, Mapping):
            raise ConfigError(f"Mesh: split={self.split!r}; it is by layer, such as {{'output': 'replicate'}}.")
        if not isinstance(self.pipeline, Pipeline):
            raise ConfigError(f"Mesh: pipeline={self.pipeline!r}; it is a tutti.Pipeline(schedule=...).")

    @property
    def shape(self) -> dict[Axis, int]:
        return {"pipe": self.pipe, "data": self.data, "tensor": self.tensor}

    @property
    def size(self) -> int:
        return prod(self.shape.values())

    def mistakes(self, num_ranks: int) -> list[str]:
        """What is wrong with using it on so many ranks."""
        if self.size == num_ranks:
            return []
        return [
            f"a mesh of data={self.data} x tensor={self.tensor} x pipe={self.pipe} has {self.size} ranks, and the "
            f"world has {num_ranks}. Start {self.size}, or choose axes whose product is {num_ranks}."
        ]

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Where a rank is on every axis."""
        found: dict[Axis, int] = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, self.shape[axis])
        return found

    def ranks_along(self, axis: Axis, rank: int) -> list[int]:
        """The ranks of the row along `axis` in which `rank` is, in order."""
        place = self.coordinates(rank)
        return [self._rank({**place, axis: number}) for number in range(self.shape[axis])]

    def replica_ranks(self, rank: int) -> list[int]:
        """The ranks that have one replica together with `rank`, itself among them, in order."""
        return [each for stage in self.ranks_along("pipe", rank) for each in self.ranks_along("tensor", stage)]

    def _rank(self, place: dict[Axis, int]) -> int:
        rank = 0
        for axis in AXES:
            rank = rank * self.shape[axis] + place[axis]
        return rank
