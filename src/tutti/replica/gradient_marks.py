"""`GradientMarks`: whether gradients were changed between the end of backward and the optimiser's step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tutti.replica.buckets import Bucket
from tutti.replica.value_samples import ValueSamples

_NUM_VALUES = 128
"""Values of each bucket in a sample, which has the gradients of several parameters."""


class GradientMarks:
    """Remembers the gradients as backward left them.

    A gradient that was replaced or set to None is another object. One that was changed in place has another tensor
    version; since gradients are views of their bucket, one version stands for all gradients of a bucket.

    Versions miss changes through `p.grad.data` and `GradScaler.unscale_`. So values are compared as well: all of them
    at first, because a training loop that changes gradients usually does so from its first step on, and a sample after
    `trust_versions`.
    """

    def __init__(self) -> None:
        self._grads: list[Tensor | None] = []
        self._versions: list[int] = []
        self._values: list[Tensor] = []
        self._samples: ValueSamples | None = None
        self._compares_values = True

    def trust_versions(self) -> None:
        """Compare a sample of values from now on: all would cost a pass over memory in every step."""
        self._compares_values = False
        self._values = []

    def record(self, buckets: Sequence[Bucket]) -> None:
        """Remember the gradients as they are now."""
        self._grads = _gradients(buckets)
        self._versions = [bucket.flat._version for bucket in buckets]
        if self._compares_values:
            self._values = [bucket.flat.clone() for bucket in buckets]
            return
        if self._samples is None:
            self._samples = ValueSamples([bucket.flat for bucket in buckets], _NUM_VALUES)
        self._samples.take()

    def differ(self, buckets: Sequence[Bucket]) -> bool:
        """Whether any gradient was changed since `record`."""
        if self._versions != [bucket.flat._version for bucket in buckets]:
            return True
        if any(now is not then for now, then in zip(_gradients(buckets), self._grads, strict=True)):
            return True
        if self._samples is not None:
            return bool(self._samples.changed())
        # As bytes: NaN equals itself then.
        return any(
            not torch.equal(bucket.flat.view(torch.uint8), values.view(torch.uint8))
            for bucket, values in zip(buckets, self._values, strict=False)
        )


def _gradients(buckets: Sequence[Bucket]) -> list[Tensor | None]:
    return [slot.tensor.grad for bucket in buckets if bucket.of_parameters for slot in bucket.slots]
