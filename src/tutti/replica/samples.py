"""Sample counts: how many samples a rank contributed to a step, which is the weight of its gradient in the mean."""

from math import isnan
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from tutti.errors import ConfigError

SHARD_SETTINGS = ("the number of samples", "batch_size", "drop_last", "seed")
"""Settings of `shard` that must be equal on all ranks."""


ADD_UP = -2.0
"""Weight of gradients that are to be added up over ranks, and not averaged. All ranks give it, or none does."""


class SampleCounts:
    """The batches that `shard` gave out, for the replicas of a world: their number, and the size of the last one."""

    def __init__(self) -> None:
        self.num_batches = 0
        """Batches given out so far."""
        self.num_samples = 0
        """Samples in the last of them."""
        self.num_exchanged = 0
        """Batches that had been given out when gradients were last exchanged."""
        self.num_committed = 0
        """Batches that had been given out when an optimiser last took a step: they are used."""
        self.num_steps = 0
        """Steps of optimisers so far, void ones included."""
        self.shard: list[int] = [-1] * len(SHARD_SETTINGS)
        """Settings of the data that a training loop draws from, as `SHARD_SETTINGS`; -1 for what is not known."""
        self.models: WeakSet[nn.Module] = WeakSet()
        """Models that are trained with gradients exchanged."""
        self.distributed: WeakSet[nn.Module] = WeakSet()
        """Models that are distributed, under any strategy."""
        self.num_training_ranks: int | None = None
        """Number of ranks that train, where others are dedicated servers; None where all ranks train."""

    def record_batch(self, num_samples: int) -> None:
        """Record a batch that was given out. Under no_grad it is for evaluation, and does not count."""
        if torch.is_grad_enabled():
            self.num_batches += 1
            self.num_samples = num_samples

    def commit(self) -> None:
        """Record that an optimiser has taken a step, or a void one, with the batches that were given out."""
        self.num_committed = self.num_batches
        self.num_steps += 1

    def commit_void_steps(self) -> None:
        """Record steps that were skipped, of which no optimiser tells: their batches are used, as those of others.

        A `GradScaler` calls no step if a gradient is not finite. Such a gradient is still there, or `zero_grad` has
        dropped it or set it to 0: that of a step to come, which exchanged it, would be there and finite. All ranks find
        the same, since they have the same gradients.
        """
        if self.num_committed >= self.num_exchanged or not self.models:
            return
        grads = [parameter.grad for model in self.models for parameter in model.parameters()]
        values = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads if grad is not None]
        is_finite = all(bool(value.isfinite().all()) for value in values)
        if not is_finite or not any(bool(value.any()) for value in values):
            self.num_committed = self.num_exchanged

    def record_shard(self, num_samples: int, batch_size: int | None, drop_last: bool, seed: int) -> None:
        """Record that an epoch of sharded data begins. Under no_grad it is for evaluation, and does not count."""
        if torch.is_grad_enabled():
            self.shard = [num_samples, -1 if batch_size is None else batch_size, int(drop_last), seed]

    @property
    def in_training(self) -> bool:
        """Whether a batch that is given out now is likely to be trained on.

        A rank that runs out of data must take part in the last step then, under every strategy: a rank that has taken
        fewer steps than the others is missing in their collective calls.
        """
        return torch.is_grad_enabled() and any(model.training for model in self.distributed)


class Contribution:
    """The samples that one replica has seen since its last exchange.

    They are, in this order of preference: what the user stated (`add`); the size of the batch from `shard`, if just
    one was given out for this backward pass; the first dimension of the first tensor given to the model. `forward` runs
    inside compiled graphs, so it only stores a number and reads nothing that changes.
    """

    def __init__(self, sample_counts: SampleCounts) -> None:
        self._sample_counts = sample_counts
        self._num_seen = sample_counts.num_batches
        """Batches from `shard` at the last backward pass."""
        self._rows: int | None = None
        """Rows of the last forward pass; None once a backward pass has counted them."""
        self._stated: float | None = None
        """Samples that the user stated since the last exchange."""
        self._counted: float | None = None
        """Samples that were counted since the last exchange."""
        self._counted_batch = False
        """Whether a batch from `shard` is among them."""
        self.last_weight = 1.0
        """Weight of the last exchange."""
        self.num_exchanges = 0
        """Exchanges so far."""
        self.num_summed = 0
        """What each rank multiplies gradients by if the loss is a sum, so that the exchange gives their sum over ranks.

        It is the number of ranks where the exchange makes means, and 1 where it adds up; 0 where the loss is a mean.
        Gradients of sums say themselves what they weigh, so that all exchanges then have the same weight.
        """
        self.sum_weight = 1.0
        """The weight of every exchange if the loss is a sum: 1, or `ADD_UP`."""

    def add(self, num_samples: float) -> None:
        """State samples of the next exchange; NaN asks every rank to stop."""
        if self.num_summed and not isnan(num_samples):
            raise ConfigError(
                'job.contributed has no meaning with loss="sum", which adds gradients up and weighs none of them: '
                "leave it out, or use a mean."
            )
        self._stated = (self._stated or 0.0) + num_samples

    @property
    def is_empty(self) -> bool:
        """Whether the batch that is trained on does not count: it has taken its place where `shard` had none left."""
        # Only a batch that was given out for this pass: `num_samples` is that of the last one, however long ago.
        given_out = self._sample_counts.num_batches > self._num_seen or self._counted_batch
        return given_out and self._sample_counts.num_samples == 0

    def as_part_of_sum(self, gradient: Tensor) -> Tensor:
        """Return what this rank contributes of a gradient, so that the mean over ranks becomes the sum if it should."""
        if not self.num_summed:
            return gradient
        if self.is_empty:
            return torch.zeros_like(gradient)  # Not a product with 0, which would keep a NaN.
        return gradient if self.num_summed == 1 else gradient * float(self.num_summed)

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the number of rows of a forward pass."""
        self._rows = num_rows(args or kwargs)

    def backward(self) -> None:
        """Count the samples of the backward pass that has begun. Calling it again in the same pass adds nothing."""
        num_given_out = self._sample_counts.num_batches - self._num_seen
        if num_given_out == 1:
            self._counted = (self._counted or 0.0) + self._sample_counts.num_samples
            self._counted_batch = True
        elif self._rows is not None and not (num_given_out == 0 and self._counted_batch):
            # Several batches were given out (prefetched, for example), or none: rows are the better measure then.
            # Microbatches of a batch from `shard` that counts already are not counted again.
            self._counted = (self._counted or 0.0) + self._rows
        self._num_seen, self._rows = self._sample_counts.num_batches, None

    def take(self) -> float:
        """Return the weight of the exchange that starts now: the last one again, where nothing new was counted."""
        self.backward()
        self.num_exchanges += 1
        self._sample_counts.num_exchanged = self._num_seen
        # A second backward through the same graph has no forward pass of its own.
        weight = self.last_weight if self._counted is None else self._counted
        weight = weight if self._stated is None else self._stated
        if self.num_summed and not isnan(weight):
            weight = self.sum_weight
        self._stated, self._counted, self._counted_batch, self.last_weight = None, None, False, weight
        return weight


def num_rows(value: Any) -> int:
    """Return the first dimension of the first tensor in nested containers; 1 where there is none."""
    tensor = _first_tensor(value)
    return len(tensor) if tensor is not None and tensor.dim() else 1


def _first_tensor(value: Any) -> Tensor | None:
    """Return the first tensor in nested containers, depth first; None if there is none."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return None
    for item in value:
        if (tensor := _first_tensor(item)) is not None:
            return tensor
    return None
