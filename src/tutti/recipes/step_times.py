"""Step times of the large models at several batch sizes: measured on one GPU, scaled to another.

Published speeds (`tutti.recipes.speeds`) are for one batch size each. The measurements of an H200 at four batch sizes
give the dependence on the batch size, and the published speeds give the factor to another GPU.
"""

import math
from typing import NamedTuple

from tutti.cluster import Compute
from tutti.recipes.speeds import seconds_per_sample


class StepTime(NamedTuple):
    """Milliseconds of the parts of a training step."""

    forward_ms: float
    backward_ms: float
    step_ms: float
    """Milliseconds of the optimiser's step."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return sum(self) / 1e3


H200: dict[str, dict[int, StepTime]] = {
    "alexnet": {
        64: StepTime(2.070, 3.864, 0.522),
        128: StepTime(3.383, 7.252, 0.522),
        256: StepTime(6.002, 15.298, 0.524),
        512: StepTime(11.051, 29.529, 0.525),
    },
    "googlenet": {
        64: StepTime(10.034, 19.866, 0.160),
        128: StepTime(17.247, 37.013, 0.160),
        256: StepTime(32.549, 70.704, 0.160),
        512: StepTime(62.105, 137.739, 0.158),
    },
    "resnet50": {
        64: StepTime(20.721, 46.980, 0.292),
        128: StepTime(38.292, 87.927, 0.291),
        256: StepTime(72.061, 167.969, 0.290),
        512: StepTime(140.083, 329.518, 0.291),
    },
}
"""Medians of 30 by batch size, from `python -m tutti.bench.gpu_step_times`: torch 2.11, float32 without TF32."""

PUBLISHED_AT = {"resnet50": 64, "alexnet": 512}
"""The batch sizes at which the speeds of a K80 in `tutti.recipes.speeds` were published."""


def k80_ratios() -> dict[str, float]:
    """Step time of one GPU of a K80 (which has two), relative to an H200, by model."""
    return {
        model: batch_size * seconds_per_sample("k80", model) / H200[model][batch_size].seconds
        for model, batch_size in PUBLISHED_AT.items()
    }


def k80_factor() -> float:
    """The geometric mean of `k80_ratios`: the factor on the step times of all models."""
    ratios = k80_ratios().values()
    return math.prod(ratios) ** (1 / len(ratios))


K20_TO_K40 = 26.5 / 36.0
"""Speeds of AlexNet in Caffe without cuDNN (BVLC 2014, "Performance and Hardware Configuration")."""


def k20(model: str) -> Compute:
    """Computing times of a K20 with Caffe and cuDNN: those of a K40, scaled by the ratio of both without cuDNN."""
    return Compute(sample_s=seconds_per_sample("k40", model) / K20_TO_K40)


def k80(model: str, batch_size: int) -> Compute:
    """Computing times of one GPU of a K80 for steps of `batch_size` images."""
    forward_ms, backward_ms, step_ms = H200[model][batch_size]
    scale = k80_factor() / 1e3
    computing_ms = forward_ms + backward_ms
    return Compute(
        sample_s=scale * computing_ms / batch_size, step_s=scale * step_ms, forward=forward_ms / computing_ms
    )
