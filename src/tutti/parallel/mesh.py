"""`Mesh`: ranks in a grid with one axis each for data, tensor and pipeline parallelism."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal, get_args

from tutti.errors import ConfigError
from tutti.parallel.pipeline.settings import Pipeline
from tutti.parallel.tensor.styles import ParallelStyle

Axis = Literal["pipe", "data", "tensor"]

AXES: tuple[Axis, ...] = get_args(Axis)
"""All axes, from the one whose neighbours are furthest apart in rank to the one whose neighbours are adjacent."""


@dataclass(frozen=True)
class Mesh:
    """The number of ranks along each axis of parallelism.

    Adjacent ranks split layers (`tensor`), since these communicate most. Then come replicas (`data`), which any
    strategy synchronises. Furthest apart are the stages of a pipeline (`pipe`), which communicate least.

    Args:
        data: number of replicas.
        tensor: number of ranks that split the layers of a stage.
        pipe: number of ranks that hold the stages of a replica.
        split: styles of layers that `tutti.tensor_plan` would split otherwise, by name, or by pattern of names such as
            "blocks.*.mlp.0".
        pipeline: schedule and cut of the pipeline.
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
            raise ConfigError(
                f"Mesh: split={self.split!r}; it must map names of layers to styles, as {{'output': 'replicate'}}."
            )
        if not isinstance(self.pipeline, Pipeline):
            raise ConfigError(f"Mesh: pipeline={self.pipeline!r}; it must be a tutti.Pipeline(schedule=...).")

    @property
    def shape(self) -> dict[Axis, int]:
        """Number of ranks along each axis."""
        return {"pipe": self.pipe, "data": self.data, "tensor": self.tensor}

    @property
    def size(self) -> int:
        """Number of all ranks."""
        return prod(self.shape.values())

    @property
    def is_split(self) -> bool:
        """Whether a replica of the model is split over several ranks."""
        return self.tensor * self.pipe > 1

    def mistakes(self, num_ranks: int) -> list[str]:
        """Return what is wrong with using the mesh on `num_ranks` ranks."""
        if self.size == num_ranks:
            return []
        return [
            f"a mesh of data={self.data} x tensor={self.tensor} x pipe={self.pipe} has {self.size} ranks, and the "
            f"world has {num_ranks}. Start {self.size}, or choose axes whose product is {num_ranks}."
        ]

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Return the coordinate of a rank on every axis."""
        coordinates: dict[Axis, int] = {}
        for axis in reversed(AXES):  # The last axis varies fastest.
            rank, coordinates[axis] = divmod(rank, self.shape[axis])
        return coordinates

    def ranks_along(self, axis: Axis, rank: int) -> list[int]:
        """Return the ranks that differ from `rank` on `axis` alone, and itself, in order."""
        coordinates = self.coordinates(rank)
        return [self._rank({**coordinates, axis: coordinate}) for coordinate in range(self.shape[axis])]

    def replica_ranks(self, rank: int) -> list[int]:
        """Return the ranks that hold one replica of the model together with `rank`, and itself, in order."""
        # Stage by stage. Saved states list the parts of a replica in this order (`ModelOnMesh.gather_state`).
        return [member for stage in self.ranks_along("pipe", rank) for member in self.ranks_along("tensor", stage)]

    def _rank(self, coordinates: dict[Axis, int]) -> int:
        """Return the rank at these coordinates: the inverse of `coordinates`."""
        rank = 0
        for axis in AXES:
            rank = rank * self.shape[axis] + coordinates[axis]
        return rank
