"""ScaleGroups: stretches of a flat tensor whose values share a scale."""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

MIN_GROUP_NUMEL, MAX_GROUP_NUMEL = 256, 4096
"""Rows are joined up to the one, so that scales stay few, and cut at the other, so that a run stays in the cache."""


class GroupTable(NamedTuple):
    """ScaleGroups as kernels read them: from where to where, and where in the payload the codes of each begin."""

    starts: Tensor
    stops: Tensor
    offsets: Tensor
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray]
    """The same three in the CPU's memory."""
    num_bytes: int
    longest: int
    """Elements of the longest run."""
    aligned: bool
    """Whether every run begins and ends at a multiple of 16."""


class ScaleGroups:
    """Stretches of a flat tensor of `numel` elements, in order and apart; what lies between them is nobody's.

    A row of a matrix as torch has it, what leads to one unit, is a *column* to Seide et al. 2014, who write z = Wᵀv.
    """

    def __init__(self, starts: np.ndarray, stops: np.ndarray, numel: int) -> None:
        assert not len(starts) or (
            int((stops - starts).max()) <= MAX_GROUP_NUMEL and starts[0] >= 0 and stops[-1] <= numel
        )
        self.starts = starts
        self.stops = stops
        self.numel = numel
        self._tables: dict[tuple[int, torch.device], GroupTable] = {}
        self._blocks: dict[int, ScaleGroups] = {}

    def __len__(self) -> int:
        return len(self.starts)

    @classmethod
    def from_shape(cls, shape: tuple[int, ...]) -> "ScaleGroups":
        """The rows of a tensor of this shape that lies in memory row by row."""
        return _row_groups(shape)

    @classmethod
    def from_layout(cls, layout: Iterable[tuple[int, tuple[int, ...]]], numel: int) -> "ScaleGroups":
        """The rows of tensors that lie in a flat tensor in this layout."""
        parts = [(start, _row_groups(shape)) for start, shape in layout]
        starts = [start + part.starts for start, part in parts]
        stops = [start + part.stops for start, part in parts]
        none = np.empty(0, np.int64)
        return cls(np.concatenate([none, *starts]), np.concatenate([none, *stops]), numel)

    def blocks(self, size: int) -> "ScaleGroups":
        """The same, in stretches of `size` at most."""
        if size not in self._blocks:
            pieces = [np.arange(a, b, size) for a, b in zip(self.starts, self.stops, strict=True)]
            starts = np.concatenate([np.empty(0, np.int64), *pieces])
            ends = np.repeat(self.stops, [len(piece) for piece in pieces])
            self._blocks[size] = ScaleGroups(starts, np.minimum(starts + size, ends), self.numel)
        return self._blocks[size]

    def cut(self, num_parts: int) -> list[tuple[slice, "ScaleGroups"]]:
        """The flat tensor in parts of about equal length, each of whole groups."""
        goals = np.arange(1, num_parts) * self.numel / num_parts
        firsts = [0, *np.searchsorted(self.starts, goals), len(self)]
        edges = [0, *(int(self.starts[i]) if i < len(self) else self.numel for i in firsts[1:-1]), self.numel]
        return [
            (
                slice(edges[part], edges[part + 1]),
                ScaleGroups(
                    self.starts[firsts[part] : firsts[part + 1]] - edges[part],
                    self.stops[firsts[part] : firsts[part + 1]] - edges[part],
                    edges[part + 1] - edges[part],
                ),
            )
            for part in range(num_parts)
        ]

    def table(self, bits: int, device: torch.device) -> GroupTable:
        """For codes of so many bits, which begin on a byte with every run."""
        key = (bits, device)
        if key not in self._tables:
            sizes = ((self.stops - self.starts) * bits + 7) // 8
            offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
            arrays = self.starts, self.stops, offsets
            starts, stops, layout = (torch.from_numpy(each).to(device) for each in arrays)
            longest = int((self.stops - self.starts).max(initial=0))
            aligned = not ((self.starts | self.stops) & 15).any()
            self._tables[key] = GroupTable(starts, stops, layout, arrays, int(offsets[-1]), longest, aligned)
        return self._tables[key]

    def num_bytes(self, bits: int) -> int:
        """Of all codes of so many bits."""
        return int((((self.stops - self.starts) * bits + 7) // 8).sum())

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self


@lru_cache(maxsize=1024)
def _row_groups(shape: tuple[int, ...]) -> ScaleGroups:
    numel = int(np.prod(shape, dtype=np.int64))
    row = numel // shape[0] if len(shape) > 1 and shape[0] else numel
    if row and row < MIN_GROUP_NUMEL:
        row *= -(-MIN_GROUP_NUMEL // row)
    size = max(1, min(row, MAX_GROUP_NUMEL))
    starts = np.arange(0, numel, size, dtype=np.int64)
    return ScaleGroups(starts, np.minimum(starts + size, numel), numel)
