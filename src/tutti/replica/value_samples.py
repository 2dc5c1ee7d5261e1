"""`ValueSamples`: a few values of every tensor, which show changes in memory that leave no other trace.

A write through `tensor.data`, or through a NumPy array of the same memory, gives a tensor no new version. To compare
all values in every step would read all memory twice. So a sample is compared, of other elements from time to time: a
change of a whole tensor shows at once, and one of some elements, if it is made again and again, later.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_STEPS_PER_SAMPLE = 8
"""Samples that are taken of the same elements: to choose others takes as long as to read them."""


class ValueSamples:
    """Takes samples of the values of some tensors; of none that are not in the memory of the CPU."""

    def __init__(self, tensors: Sequence[Tensor], num_values: int = 64) -> None:
        """Take samples of up to `num_values` of each tensor, spread evenly over it."""
        self._tensors, self._num_values = list(tensors), num_values
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        # Arrays share the memory of the tensors: to read them takes a tenth of the time that torch takes.
        self._arrays = list(map(_flat_array, self._tensors))
        self._number = 0
        self._sampled: list[np.ndarray[Any, Any]] = []
        """The elements of each tensor that are in the sample, as views."""
        self._taken: list[bytes] = []

    def take(self) -> None:
        """Take a sample of the values as they are now."""
        self._number += 1
        if self._follow_memory() or self._number % _STEPS_PER_SAMPLE == 1:
            self._choose()
        self._taken = [view.tobytes() for view in self._sampled]

    def changed(self) -> list[int]:
        """Return the indices of the tensors whose sample is another than the one that was taken last."""
        if self._follow_memory():
            self._choose()
        now = [view.tobytes() for view in self._sampled]
        return [] if now == self._taken else [i for i, value in enumerate(now) if value != self._taken[i]]

    def _choose(self) -> None:
        """Choose the elements of the present sample."""
        strides = [-(-len(array) // self._num_values) or 1 for array in self._arrays]
        first = (self._number - 1) // _STEPS_PER_SAMPLE
        self._sampled = [array[first % stride :: stride] for array, stride in zip(self._arrays, strides, strict=True)]

    def _follow_memory(self) -> bool:
        """Return whether a tensor has moved to other memory, by an assignment to `tensor.data`; read it from there."""
        addresses = list(map(Tensor.data_ptr, self._tensors))
        if addresses == self._addresses:
            return False
        self._addresses, self._arrays = addresses, list(map(_flat_array, self._tensors))
        return True


def _flat_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return the elements of a tensor in the order of memory; none where that cannot be read without a copy."""
    data = tensor.detach()
    if type(data) is not Tensor or data.device.type != "cpu":
        return np.empty(0, np.uint8)
    dense = data.permute(sorted(range(data.dim()), key=data.stride, reverse=True))
    if not dense.is_contiguous():  # There are gaps in memory.
        return np.empty(0, np.uint8)
    return dense.view(-1).view(torch.uint8).numpy().view(np.dtype((np.void, data.itemsize)))
