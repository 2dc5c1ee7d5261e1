"""Selection of the largest values: by a threshold from a sample, without sorting all of them.

A sample gives a threshold that slightly too many values reach. One pass picks those, and only they are partitioned
exactly.
"""

import math

import numpy as np
from torch import Tensor

from tutti.codecs import kernels
from tutti.codecs.indices import check_room

_SAMPLE = 2**15
"""Values in the sample. If a hundredth of them is wanted, the threshold's rank is right within a few percent."""


def about_largest(values: Tensor, residual: Tensor | None, density: float, spare: float = 0.0) -> float:
    """Estimate the magnitude that `density` of the values reach, from a sample.

    Args:
        residual: added to `values`, if there is one.
        spare: standard deviations of the sample's count by which the threshold is lower than that, so that enough
            values reach it.
    """
    stride = max(1, values.numel() // _SAMPLE)
    stride += stride > 1 and stride % 2 == 0  # An even stride would sample few columns of a matrix.
    sample = values[::stride] if residual is None else values[::stride] + residual[::stride]
    sample = sample.abs()
    sample = sample[sample.isfinite()]
    if not sample.numel():
        return 0.0
    # The count of a sample varies by about its square root (Poisson).
    wanted = density * sample.numel()
    # One more where there is a margin: the root of a very small count is none.
    rank = min(sample.numel(), math.ceil(wanted + spare * math.sqrt(wanted) + (spare > 0)))
    return _least_of_largest(sample, max(1, rank))


def largest(values: Tensor, residual: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """Return the indices, in order, and the values of the `count` largest magnitudes; fewer if the others are zero.

    Values are added to the residual first, if there is one. Values that are not finite count as the largest, and leave
    the residual as it was.
    """
    check_room(values.numel())
    pick = kernels.for_device(values.device).pick
    threshold = about_largest(values, residual, count / max(1, values.numel()), spare=4.0)
    indices, picked = pick(values, residual, threshold)
    if len(indices) < count and threshold > 0:  # The sample was not representative: pick all that are not zero.
        # The first pass has already added the values to the residual, except where they are not finite.
        source = values if residual is None else residual.clone()
        source[indices.long()] = picked
        indices, picked = pick(source, None, 0.0)
    if len(indices) <= count:
        return indices, picked
    # NaN would compare as false below, and be left out.
    magnitude = picked.abs().nan_to_num(nan=math.inf, posinf=math.inf)
    least = _least_of_largest(magnitude, count)
    chosen = magnitude >= least
    # Ties at the smallest magnitude are resolved by index, so that the result depends on the values alone.
    if (surplus := int(chosen.sum()) - count) > 0:
        ties = (magnitude == least).nonzero().flatten()
        chosen[ties[-surplus:]] = False
    kept = chosen.nonzero().flatten()
    return indices.index_select(0, kept), picked.index_select(0, kept)


def _least_of_largest(magnitudes: Tensor, count: int) -> float:
    """Return the smallest of the `count` largest magnitudes."""
    if magnitudes.device.type != "cpu":
        return float(magnitudes.topk(count, sorted=False).values.min())
    return float(np.partition(magnitudes.numpy(), -count)[-count])  # Faster than torch.topk on a CPU.
