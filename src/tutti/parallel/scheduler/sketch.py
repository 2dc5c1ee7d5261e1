"""Which of many vectors are alike, from a few bits of each."""

import math

import numpy as np
from torch import Tensor

NUM_BITS = 256
OPERATIONS = 8.0
"""To compare two: their words are compared and bits counted."""
_ALIKE = np.abs(np.cos(math.pi * np.arange(NUM_BITS + 1) / NUM_BITS))
"""The cosine of the angle between two vectors, up to its sign, by the number of bits in which they differ."""


class SimHash:
    """The signs of random projections: in how many two vectors differ tells the angle between them (Charikar 2002).

    Comparing is by whole numbers, so that it comes to the same on every processor.

    Args:
        projected: vectors by `NUM_BITS` projections, on directions that are normally distributed.
    """

    def __init__(self, projected: Tensor) -> None:
        assert projected.shape[1] == NUM_BITS
        words = np.packbits((projected >= 0).numpy(), axis=1).view(np.uint64)
        self._words = np.ascontiguousarray(words.T)

    def pairwise_similarity(self, some: np.ndarray) -> np.ndarray:
        """How alike some of the vectors are, each to each: the absolute value of their cosine, about."""
        return _alike([np.bitwise_xor.outer(word, word) for word in self._words[:, some]])

    def neighbours(self, one: int, limit: float) -> tuple[np.ndarray, np.ndarray]:
        """Which others are more like this one than `limit`, and how much they are."""
        alike = _alike([word ^ word[one] for word in self._words])
        alike[one] = 0.0
        others = (alike > limit).nonzero()[0]
        return others, alike[others]


def _alike(differing: list[np.ndarray]) -> np.ndarray:
    num_bits = np.zeros(differing[0].shape, dtype=np.uint16)
    for word in differing:
        num_bits += np.bitwise_count(word)
    alike: np.ndarray = _ALIKE[num_bits]
    return alike
