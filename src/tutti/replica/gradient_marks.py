"""`GradientMarks`: whether gradients were changed between the end of backward and the optimiser's step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tutti.replica.buckets import Bucket


class GradientMarks:
    """Remembers the gradients as backward left them.

    A gradient that was replaced or set to None is another object. One that was changed in place has another tensor
    version; since gradients are views of their bucket, one version stands for all gradients of a bucket.

    Versions miss changes through `p.grad.data` and `GradScaler.unscale_`. So values are compared as well at first,
    until `trust_versions`: a training loop that changes gradients usually does so from its first step on.
    """

    def __init__(self) -> None:
        self._grads: list[Tensor | None] = []
        self._versions: list[int] = []
        self._values: list[Tensor] = []
        self._compares_values = True

    def trust_versions(self) -> None:
        """Compare no values from now on, which would cost a pass over memory in every step."""
        self._compares_values = False
        self._values = []

    def record(self, buckets: Sequence[Bucket]) -> None:
        """Remember the gradients as they are now."""
        self._grads = _gradients(buckets)
        self._versions = [bucket.flat._version for bucket in buckets]
        if self._compares_values:
            self._values = [bucket.flat.clone() for bucket in buckets]

    def differ(self, buckets: Sequence[Bucket]) -> bool:
        """Whether any gradient was changed since `record`."""
        if self._versions != [bucket.flat._version for bucket in buckets]:
            return True
        if any(now is not then for now, then in zip(_gradients(buckets), self._grads, strict=True)):
            return True
        # As bytes: NaN equals itself then.
        return any(
            not torch.equal(bucket.flat.view(torch.uint8), values.view(torch.uint8))
            for bucket, values in zip(buckets, self._values, strict=False)
        )


def _gradients(buckets: Sequence[Bucket]) -> list[Tensor | None]:
    return [slot.tensor.grad for bucket in buckets if bucket.of_parameters for slot in bucket.slots]
