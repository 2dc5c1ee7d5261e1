"""`SimHash`: the angles between many vectors, estimated from a few bits of each (Charikar 2002)."""

import math

import numpy as np
from torch import Tensor

NUM_BITS = 256
"""Number of random projections, and of bits kept of each vector."""

OPERATIONS = 8.0
"""Operations of a comparison of two vectors, for virtual time: words are compared, and bits counted."""

_COSINE_BY_DISTANCE = np.abs(np.cos(math.pi * np.arange(NUM_BITS + 1) / NUM_BITS))
"""The absolute cosine of the angle between two vectors, by the number of bits in which they differ."""


class SimHash:
    """The signs of random projections of vectors. The share in which two differ is their angle divided by π.

    Comparisons use integers only, so that the result is the same on every processor.

    Args:
        projected: vectors x `NUM_BITS`: the projections of each vector on normally distributed directions.
    """

    def __init__(self, projected: Tensor) -> None:
        assert projected.shape[1] == NUM_BITS
        words = np.packbits((projected >= 0).numpy(), axis=1).view(np.uint64)
        self._words = np.ascontiguousarray(words.T)
        """Words x vectors: a word of all vectors lies together, since comparisons go word by word."""

    def pairwise_similarity(self, vectors: np.ndarray) -> np.ndarray:
        """Return the estimated absolute cosine between each pair of `vectors`, which are given by their numbers."""
        return _similarity([np.bitwise_xor.outer(word, word) for word in self._words[:, vectors]])

    def neighbours(self, vector: int, limit: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of other vectors with a similarity above `limit`, and their similarities."""
        similarity = _similarity([word ^ word[vector] for word in self._words])
        similarity[vector] = 0.0
        others = (similarity > limit).nonzero()[0]
        return others, similarity[others]


def _similarity(differing: list[np.ndarray]) -> np.ndarray:
    """Return similarities from words in which the differing bits are set."""
    # uint16, since all 256 bits may differ.
    num_bits = np.zeros(differing[0].shape, dtype=np.uint16)
    for word in differing:
        num_bits += np.bitwise_count(word)
    similarity: np.ndarray = _COSINE_BY_DISTANCE[num_bits]
    return similarity
