"""Runs: stretches of a flat tensor whose values share a scale."""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

SHORTEST, LONGEST = 256, 4096
"""Rows are joined up to the one, so that scales stay few, and cut at the other, so that a run stays in the cache."""


class Table(NamedTuple):
    """Runs as kernels read them: from where to where, and where in the payload the codes of each begin."""

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


class Runs:
    """Stretches of a flat tensor of `numel` elements, in order and apart; what lies between them is nobody's.

    A row of a matrix as torch has it, what leads to one unit, is a *column* to Seide et al. 2014, who write z = Wᵀv.
    """

    def __init__(self, starts: np.ndarray, stops: np.ndarray, numel: int) -> None:
        assert not len(starts) or (int((stops - starts).max()) <= LONGEST and starts[0] >= 0 and stops[-1] <= numel)
        self.starts = starts
        self.stops = stops
        self.numel = numel
        self._tables: dict[tuple[int, torch.device], Table] = {}
        self._blocks: dict[int, Runs] = {}

    def __len__(self) -> int:
        return len(self.starts)

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> "Runs":
        """The rows of a tensor of this shape that lies in memory row by row."""
        return _of(shape)

    @classmethod
    def within(cls, places: Iterable[tuple[int, tuple[int, ...]]], numel: int) -> "Runs":
        """The rows of tensors that start at these places of a flat tensor."""
        parts = [(start, _of(shape)) for start, shape in places]
        starts = [start + part.starts for start, part in parts]
        stops = [start + part.stops for start, part in parts]
        none = np.empty(0, np.int64)
        return cls(np.concatenate([none, *starts]), np.concatenate([none, *stops]), numel)

    def blocks(self, size: int) -> "Runs":
        """The same, in stretches of `size` at most."""
        if size not in self._blocks:
            pieces = [np.arange(a, b, size) for a, b in zip(self.starts, self.stops, strict=True)]
            starts = np.concatenate([np.empty(0, np.int64), *pieces])
            ends = np.repeat(self.stops, [len(piece) for piece in pieces])
            self._blocks[size] = Runs(starts, np.minimum(starts + size, ends), self.numel)
        return self._blocks[size]

    def cut(self, num_parts: int) -> list[tuple[slice, "Runs"]]:
        """The flat tensor in parts of about equal length, each of whole runs."""
        goals = np.arange(1, num_parts) * self.numel / num_parts
        firsts = [0, *np.searchsorted(self.starts, goals), len(self)]
        edges = [0, *(int(self.starts[i]) if i < len(self) else self.numel for i in firsts[1:-1]), self.numel]
        return [
            (
                slice(edges[part], edges[part + 1]),
                Runs(
                    self.starts[firsts[part] : firsts[part + 1]] - edges[part],
                    self.stops[firsts[part] : firsts[part + 1]] - edges[part],
                    edges[part + 1] - edges[part],
                ),
            )
            for part in range(num_parts)
        ]

    def table(self, bits: int, device: torch.device) -> Table:
        """For codes of so many bits, which begin on a byte with every run."""
        key = (bits, device)
        if key not in self._tables:
            sizes = ((self.stops - self.starts) * bits + 7) // 8
            offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
            arrays = self.starts, self.stops, offsets
            starts, stops, places = (torch.from_numpy(each).to(device) for each in arrays)
            longest = int((self.stops - self.starts).max(initial=0))
            aligned = not ((self.starts | self.stops) & 15).any()
            self._tables[key] = Table(starts, stops, places, arrays, int(offsets[-1]), longest, aligned)
        return self._tables[key]

    def num_bytes(self, bits: int) -> int:
        """Of all codes of so many bits."""
        return int((((self.stops - self.starts) * bits + 7) // 8).sum())

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self


@lru_cache(maxsize=1024)
def _of(shape: tuple[int, ...]) -> Runs:
    numel = int(np.prod(shape, dtype=np.int64))
    row = numel // shape[0] if len(shape) > 1 and shape[0] else numel
    if row and row < SHORTEST:
        row *= -(-SHORTEST // row)
    size = max(1, min(row, LONGEST))
    starts = np.arange(0, numel, size, dtype=np.int64)
    return Runs(starts, np.minimum(starts + size, numel), numel)
