"""`FiniteCheck`: gradients and parameters stay finite. It names the rank and the layer that had a NaN first.

One element of one gradient is read in every step: a loss that is NaN makes all gradients NaN. All parameters are
looked at with the comparisons of replicas. Gradients count only when the optimiser is about to use them: a GradScaler
skips a step whose gradients are infinite, and that is normal.
"""

import logging
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tutti.errors import NonFiniteValues
from tutti.job.checks.fingerprints import first_non_finite
from tutti.replica import HookedReplica
from tutti.replica.buckets import Slot

_log = logging.getLogger("tutti")

_NUMPY = (torch.float32, torch.float64, torch.float16)


class FiniteCheck:
    """Reads one element of the first gradient of each backward pass, before and after it is exchanged."""

    def __init__(self, replica: HookedReplica, rank: int) -> None:
        self._replica, self._rank = replica, rank
        self._slot = replica.slots[0]
        """The parameter whose gradient came first in the last backward pass."""
        self._view: Tensor | None = None
        """The view of a bucket whose first element is `_element`."""
        self._element: np.ndarray[Any, Any] | None = None
        self._told = False
        self.local = True
        """Whether this rank's own gradient was finite in this pass, as far as it was looked at."""

    def first_gradient(self, slot: Slot | None) -> None:
        """Look at this rank's own first gradient, before it is exchanged."""
        self._slot = slot or self._slot
        grad = self._slot.tensor.grad
        self.local = not self._slot.arrived or grad is None or self._is_finite(grad)

    def gradient(self) -> bool:
        """Whether the gradient that the optimiser is about to use is finite, as far as it is looked at."""
        grad = self._slot.tensor.grad
        return grad is None or self._is_finite(grad) or getattr(self._replica.optimizer, "found_inf", None) is not None

    def _is_finite(self, grad: Tensor) -> bool:
        # On a GPU a look would wait for it, so there the parameters tell.
        if grad.device.type != "cpu" or grad.dtype not in _NUMPY or grad.is_sparse or not grad.numel():
            return True
        if grad is not self._slot.view:  # Memory of the user's, which must not be kept.
            return isfinite(grad.detach().numpy().item(0))
        if grad is not self._view:
            # Shares the memory of the bucket: reading an element is then ten times as quick as by torch.
            self._view, self._element = grad, grad.detach().flatten()[:1].numpy()
        assert self._element is not None
        return isfinite(self._element.item(0))

    def gradient_error(self, by_rank: dict[int, int]) -> NonFiniteValues:
        """Return the error for a gradient that is not finite; `by_rank` is 1 where a rank's own was not, else 0."""
        ranks = [rank for rank, bad in by_rank.items() if bad]
        return NonFiniteValues(self._rank, ranks, self.first_name(), self._replica.steps)

    def first_name(self) -> str:
        """Return the first gradient that is not finite, in the order in which backward made them, as text."""
        slots = [slot for slot in (self._slot, *self._replica.slots) if slot.tensor.grad is not None]
        index = first_non_finite([slot.tensor.grad for slot in slots])  # type: ignore[misc]
        return f"the gradient of '{slots[index or 0].name}'"

    def stop_all(self, what: str) -> None:
        """Ask every rank to stop at the next exchange: under this strategy ranks do not check together."""
        if not self._told:  # Once: ranks take some more steps until they exchange.
            self._told = True
            _log.error("rank %d: %s has become NaN or infinite at step %d.", self._rank, what, self._replica.steps)
        self._replica.contribution.add(float("nan"))
