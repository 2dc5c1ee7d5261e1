"""What the mean progress of a block does to the parameters that all ranks start from."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.replica import Bucket


@dataclass(frozen=True)
class Outer:
    """Δ = momentum · Δ + lr · G, then W = W + Δ: blockwise model-update filtering (Chen & Huo 2016).

    With `nesterov`, a block starts from W + momentum · Δ. Without momentum, at rate 1, it is the plain mean.
    """

    momentum: float = 0.0
    lr: float = 1.0
    nesterov: bool = False


PLAIN = Outer()


class Stretch:
    """The parameters of a bucket, or its statistics, as blocks see them. Its memory holds what travels."""

    def __init__(self, bucket: Bucket, outer: Outer, overlap: bool) -> None:
        self.bucket = bucket
        self.outer = outer if bucket.of_parameters else PLAIN  # Statistics have no direction to go on in.
        self._travels = bucket.views(bucket.flat)
        self.start = torch.zeros_like(bucket.flat)
        """What all ranks have agreed on: a block starts from it."""
        self.velocity = torch.zeros_like(bucket.flat) if self.outer.momentum else None
        self.starts = bucket.views(self.start)
        torch._foreach_copy_(self.starts, self.tensors)
        self._base = torch.empty_like(self.start) if overlap else self.start
        """Where this rank's progress is counted from: where its last one, which may be on its way, ended."""
        self._bases = bucket.views(self._base)
        self._base.copy_(self.start)

    @property
    def tensors(self) -> list[Tensor]:
        """The model's own, which may have got other memory since."""
        return [slot.tensor.detach() for slot in self.bucket.slots]

    def pack(self) -> None:
        """Let this rank's progress travel."""
        torch._foreach_copy_(self._travels, self.tensors)
        torch._foreach_sub_(self._travels, self._bases)
        self.bucket.marks.fill_(1)

    def go_on(self) -> None:
        """What is on its way is no longer this block's."""
        torch._foreach_copy_(self._bases, self.tensors)

    def step(self, since: bool) -> None:
        """Let the mean, which has arrived, change the start; go on from there, with what was done `since`, if so."""
        mean, outer = self.bucket.flat, self.outer
        self.bucket.marks.zero_()
        if self.velocity is not None:
            self.velocity.mul_(outer.momentum).add_(mean, alpha=outer.lr)
        if self.velocity is None:
            self.start.add_(mean, alpha=outer.lr)
        elif outer.nesterov:
            self.start.add_(mean, alpha=outer.lr).add_(self.velocity, alpha=outer.momentum)
        else:
            self.start.add_(self.velocity)
        if since:
            torch._foreach_sub_(self.tensors, self._bases)
            torch._foreach_add_(self.tensors, self.starts)
        else:
            torch._foreach_copy_(self.tensors, self.starts)
        self._base.copy_(self.start)

    def agree(self) -> None:
        """Hold the mean of all ranks' parameters, which has arrived as their mean progress; the block goes on."""
        torch._foreach_copy_(self.tensors, self.starts)
        torch._foreach_add_(self.tensors, self._travels)

    def saved(self) -> tuple[list[Tensor], list[Tensor]]:
        """Copies of where the block started and of the velocities, if there are any."""
        velocities = [] if self.velocity is None else self.bucket.views(self.velocity.clone())
        return [each.clone() for each in self.starts], velocities

    def load(self, start: list[Tensor], velocities: list[Tensor], own: list[Tensor]) -> None:
        """Go on from these."""
        torch._foreach_copy_(self.starts, start)
        self._base.copy_(self.start)
        if self.velocity is not None:
            self.velocity.zero_()
        if self.velocity is not None and velocities:
            torch._foreach_copy_(self.bucket.views(self.velocity), velocities)
        torch._foreach_copy_(self.tensors, own)
