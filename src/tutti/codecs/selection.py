"""Which values are the largest: from a sample, without sorting all of them."""

import math

import numpy as np
from torch import Tensor

from tutti.codecs import kernels
from tutti.codecs.indices import check_room

_SAMPLE = 2**15
"""Values to look at: with a hundredth of them wanted, it is right within a few percent."""


def about_largest(values: Tensor, residual: Tensor | None, density: float, spare: float = 0.0) -> float:
    """A magnitude that about this share of the values reaches; more of them by `spare` deviations of the sample."""
    stride = max(1, values.numel() // _SAMPLE)
    stride += stride > 1 and stride % 2 == 0  # An even stride would look at the same few columns of every matrix.
    sample = values[::stride] if residual is None else values[::stride] + residual[::stride]
    sample = sample.abs()
    sample = sample[sample.isfinite()]
    if not sample.numel():
        return 0.0
    wanted = density * sample.numel()
    rank = min(sample.numel(), math.ceil(wanted + spare * math.sqrt(wanted) + (spare > 0)))
    return _least_of_largest(sample, max(1, rank))


def largest(values: Tensor, residual: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """The indices, in order, and the values of the `count` largest magnitudes; fewer if the others are zero.

    Values are added to the residual first, if there is one. What is not finite counts as largest, and leaves the
    residual as it was.
    """
    check_room(values.numel())
    pick = kernels.for_device(values.device).pick
    limit = about_largest(values, residual, count / max(1, values.numel()), spare=4.0)
    indices, found = pick(values, residual, limit)
    if len(indices) < count and limit > 0:  # The sample was not like the rest.
        source = values if residual is None else residual.clone()
        source[indices.long()] = found
        indices, found = pick(source, None, 0.0)
    if len(indices) <= count:
        return indices, found
    magnitude = found.abs().nan_to_num(nan=math.inf, posinf=math.inf)
    least = _least_of_largest(magnitude, count)
    chosen = magnitude >= least
    if (surplus := int(chosen.sum()) - count) > 0:
        ties = (magnitude == least).nonzero().flatten()
        chosen[ties[-surplus:]] = False
    kept = chosen.nonzero().flatten()
    return indices.index_select(0, kept), found.index_select(0, kept)


def _least_of_largest(magnitudes: Tensor, count: int) -> float:
    """The smallest of the `count` largest."""
    if magnitudes.device.type != "cpu":
        return float(magnitudes.topk(count, sorted=False).values.min())
    return float(np.partition(magnitudes.numpy(), -count)[-count])  # In less time than torch's.
