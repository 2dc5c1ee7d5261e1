"""Scale groups: contiguous stretches of a flat tensor whose values share a scale.

Codecs with scales (1-bit, quantised, fp8) store one scale per group. A group is a row of a weight, since values that
lead to one unit are of similar size: short rows are joined and long ones cut. Groups do not cross from one parameter
into the next.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

MIN_GROUP_NUMEL, MAX_GROUP_NUMEL = 256, 4096
"""Rows are joined up to the first, so that scales stay few, and cut at the second, so that a group fits the cache."""


class GroupTable(NamedTuple):
    """Scale groups as kernels read them, for codes of a fixed number of bits."""

    starts: Tensor
    """First element of every group."""
    stops: Tensor
    """Element after the last of every group."""
    offsets: Tensor
    """Byte of the payload at which the codes of every group begin, and the number of bytes as one more entry."""
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray]
    """The same three as NumPy arrays."""
    num_bytes: int
    """Bytes of all codes."""
    longest: int
    """Elements of the longest group."""
    aligned: bool
    """Whether every group begins and ends at a multiple of 16, which lets CUDA kernels load several values at once."""


class ScaleGroups:
    """Groups of a flat tensor of `numel` elements, in order and disjoint. Elements between groups are padding.

    A row of a weight as torch has it is a *column* in Seide et al. 2014, who write z = Wᵀv.
    """

    starts: np.ndarray
    """First element of every group."""
    stops: np.ndarray
    """Element after the last of every group."""

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
        """Return the rows of a contiguous tensor of this shape."""
        return _row_groups(shape)

    @classmethod
    def from_layout(cls, layout: Iterable[tuple[int, tuple[int, ...]]], numel: int) -> "ScaleGroups":
        """Return the rows of all tensors that lie in a flat tensor in this layout."""
        parts = [(start, _row_groups(shape)) for start, shape in layout]
        starts = [start + part.starts for start, part in parts]
        stops = [start + part.stops for start, part in parts]
        # `concatenate` refuses an empty list, which a layout without tensors gives.
        none = np.empty(0, np.int64)
        return cls(np.concatenate([none, *starts]), np.concatenate([none, *stops]), numel)

    def blocks(self, size: int) -> "ScaleGroups":
        """Return these groups cut into groups of at most `size` elements."""
        if size not in self._blocks:
            # For every group, where its blocks begin; the last block of a group ends where the group ends.
            pieces = [np.arange(a, b, size) for a, b in zip(self.starts, self.stops, strict=True)]
            starts = np.concatenate([np.empty(0, np.int64), *pieces])
            ends = np.repeat(self.stops, [len(piece) for piece in pieces])
            self._blocks[size] = ScaleGroups(starts, np.minimum(starts + size, ends), self.numel)
        return self._blocks[size]

    def cut(self, num_parts: int) -> list[tuple[slice, "ScaleGroups"]]:
        """Cut the flat tensor into slices of about equal length that split no group, each with its own groups."""
        # Even cuts, each moved up to the next start of a group. `firsts` are the numbers of those groups.
        goals = np.arange(1, num_parts) * self.numel / num_parts
        firsts = [0, *np.searchsorted(self.starts, goals), len(self)]
        # A goal behind the start of the last group has no group to move up to: its part begins at the end, and is
        # empty.
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
        """Return the table for codes of so many bits. The codes of every group begin on a byte. Tables are cached."""
        key = (bits, device)
        if key not in self._tables:
            # Whole bytes per group, so that groups can be packed independently of each other.
            sizes = ((self.stops - self.starts) * bits + 7) // 8
            offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
            arrays = self.starts, self.stops, offsets
            starts, stops, begins = (torch.from_numpy(array).to(device) for array in arrays)
            longest = int((self.stops - self.starts).max(initial=0))
            # The lowest four bits of all starts and stops are zero.
            aligned = not ((self.starts | self.stops) & 15).any()
            self._tables[key] = GroupTable(starts, stops, begins, arrays, int(offsets[-1]), longest, aligned)
        return self._tables[key]

    def num_bytes(self, bits: int) -> int:
        """Return the bytes of all codes of so many bits."""
        return int((((self.stops - self.starts) * bits + 7) // 8).sum())

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return itself: groups are immutable, and their tables are large."""
        return self


@lru_cache(maxsize=1024)
def _row_groups(shape: tuple[int, ...]) -> ScaleGroups:
    """Make the groups of a contiguous tensor: its rows, joined to 256 elements or cut at 4,096."""
    numel = int(np.prod(shape, dtype=np.int64))
    # A vector is one row. Short rows are joined to the next multiple that reaches the minimum.
    row = numel // shape[0] if len(shape) > 1 and shape[0] else numel
    if row and row < MIN_GROUP_NUMEL:
        row *= -(-MIN_GROUP_NUMEL // row)
    size = max(1, min(row, MAX_GROUP_NUMEL))
    starts = np.arange(0, numel, size, dtype=np.int64)
    return ScaleGroups(starts, np.minimum(starts + size, numel), numel)
