"""The outer step at the end of a block: how the mean change of all ranks moves the common parameters."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.replica import Bucket


@dataclass(frozen=True)
class OuterStep:
    """Δ = momentum · Δ + lr · G, then W = W + Δ: blockwise model-update filtering (Chen & Huo 2016).

    G is the mean change of all ranks in the block. With `nesterov`, the next block starts from W + momentum · Δ.
    Without momentum and with a rate of 1, the step is the plain average.
    """

    momentum: float = 0.0
    lr: float = 1.0
    nesterov: bool = False


PLAIN_AVERAGE = OuterStep()


class BlockParameters:
    """The parameters of one bucket, or its running statistics, over the course of blocks.

    Four values belong to every tensor, each in memory laid out like the bucket:

    - the model's own tensor, which the local optimiser changes;
    - `start`: what all ranks agreed on, from which the current block started;
    - `_base`: from where this rank's change is counted. Without overlap it is `start` itself. With overlap it is
      where this rank's last block ended, because the change of that block may still be travelling;
    - the bucket's memory, which holds the change that travels, and afterwards the mean change.

    The invariant: on all ranks `start` has the same bits, because it is only changed by the mean, which has.
    """

    def __init__(self, bucket: Bucket, outer: OuterStep, overlap: bool) -> None:
        self.bucket = bucket
        # Momentum is for parameters: running statistics are averaged, since they have no direction of descent.
        self.outer = outer if bucket.of_parameters else PLAIN_AVERAGE
        self._change = bucket.views(bucket.flat)
        self.start = torch.zeros_like(bucket.flat)
        self.velocity = torch.zeros_like(bucket.flat) if self.outer.momentum else None
        self.starts = bucket.views(self.start)
        torch._foreach_copy_(self.starts, self.tensors)
        self._base = torch.empty_like(self.start) if overlap else self.start
        self._bases = bucket.views(self._base)
        self._base.copy_(self.start)

    @property
    def tensors(self) -> list[Tensor]:
        """The model's own tensors, looked up anew each time, because they may have moved to other memory."""
        return [slot.tensor.detach() for slot in self.bucket.slots]

    def pack_change(self) -> None:
        """Write this rank's change since `_base` into the bucket's memory, to be sent."""
        # change = model - base, per tensor, written through views of the bucket's flat memory.
        torch._foreach_copy_(self._change, self.tensors)
        torch._foreach_sub_(self._change, self._bases)
        self.bucket.has_grad.fill_(1)

    def rebase(self) -> None:
        """Count this rank's change from its present parameters on: what it did before is on its way."""
        torch._foreach_copy_(self._bases, self.tensors)

    def apply_mean(self, keep_local_change: bool) -> None:
        """Apply the outer step to `start` with the mean change that has arrived, and continue from there.

        With `keep_local_change`, what this rank did since `_base` is added: with overlap, the block computed
        meanwhile.
        """
        mean, outer = self.bucket.flat, self.outer
        self.bucket.has_grad.zero_()  # Flags are no values: they must not move into `start`.
        if self.velocity is not None:
            self.velocity.mul_(outer.momentum).add_(mean, alpha=outer.lr)
        if self.velocity is None:
            self.start.add_(mean, alpha=outer.lr)
        elif outer.nesterov:
            # `start` already contains momentum times the last velocity. Adding the new step and momentum times the new
            # velocity gives W + momentum · Δ of the update rule.
            self.start.add_(mean, alpha=outer.lr).add_(self.velocity, alpha=outer.momentum)
        else:
            self.start.add_(self.velocity)
        if keep_local_change:
            # model <- start + (model - base): the local change is moved on top of the new start.
            torch._foreach_sub_(self.tensors, self._bases)
            torch._foreach_add_(self.tensors, self.starts)
        else:
            torch._foreach_copy_(self.tensors, self.starts)
        # With overlap, `_end_block` sets it again when it starts the next exchange (`rebase`).
        self._base.copy_(self.start)

    def set_to_mean(self) -> None:
        """Set the model to the mean of all ranks' parameters, from the mean change; the block continues."""
        torch._foreach_copy_(self.tensors, self.starts)
        torch._foreach_add_(self.tensors, self._change)

    def shift(self, changes: dict[str, Tensor]) -> None:
        """Add changes, by parameter, to where the block started: they are no part of what this rank changes in it."""
        for slot, start in zip(self.bucket.slots, self.starts, strict=True):
            if slot.name in changes:
                start.add_(changes[slot.name].to(start))
        self._base.copy_(self.start)

    def saved(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return copies of the block's start and of the velocities, if there are any."""
        velocities = [] if self.velocity is None else self.bucket.views(self.velocity.clone())
        return [start.clone() for start in self.starts], velocities

    def load(self, starts: list[Tensor], velocities: list[Tensor], parameters: list[Tensor]) -> None:
        """Continue from these values, as `saved` returned them, and this rank's own parameters."""
        torch._foreach_copy_(self.starts, starts)
        self._base.copy_(self.start)
        if self.velocity is not None:
            self.velocity.zero_()
        if self.velocity is not None and velocities:
            torch._foreach_copy_(self.bucket.views(self.velocity), velocities)
        torch._foreach_copy_(self.tensors, parameters)
