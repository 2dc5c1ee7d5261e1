"""Lasso by coordinate descent: every rank holds some of the samples, all features of them."""

import math

import numpy as np
import torch
from torch import Tensor

from tutti.errors import ConfigError
from tutti.parallel.scheduler import sketch
from tutti.parallel.scheduler.problem import BlockProblem
from tutti.parallel.scheduler.sums import sum_function
from tutti.transports import Transport

_PARTNERS = 0.3
"""Features are told of each other's changes if their correlation is beyond this."""


class Lasso(BlockProblem):
    """Minimise ½ ‖y − X β‖² + λ ‖β‖₁. A block is one coefficient, and depends on others by features' correlation.

    Correlations are estimated from a `SimHash` that every rank has: to compute them would take longer than the updates
    that they are for. What a coefficient's change makes urgent is itself, and coefficients of correlated features as
    far as the change may have moved them: one that is 0 is not urgent until changes could have brought it over λ.

    Args:
        features: this rank's rows of X, samples by features, on the CPU.
        targets: this rank's part of y.
        penalty: λ.
        transport: to those that have the other rows. Collective.
    """

    pair_operations = sketch.OPERATIONS

    def __init__(self, features: Tensor, targets: Tensor, penalty: float, transport: Transport) -> None:
        _check(features, targets, penalty, transport.rank)
        total = sum_function(transport)
        self.num_blocks = features.shape[1]
        self.coefficients = torch.zeros(self.num_blocks, dtype=features.dtype)
        self.penalty = penalty
        self._rows = features.t().contiguous()  # A feature's values lie together.
        self._residual = targets.clone()
        self._share = 1.0 / transport.size
        squares = self._rows.square().sum(1)
        total(squares)
        self._squares = squares.clamp_(min=torch.finfo(squares.dtype).tiny)
        own = torch.Generator().manual_seed(transport.rank)
        projected = self._rows @ torch.randn(len(targets), sketch.NUM_BITS, generator=own, dtype=features.dtype)
        total(projected)
        self._sketch = sketch.SimHash(projected)
        self._partners: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._slack = np.zeros(self.num_blocks)
        """How much the gradient of a coefficient that is 0 may change before the coefficient does."""
        self._num_searches = 0

    def push(self, blocks: Tensor, mine: Tensor) -> Tensor:
        self._picked = self._rows[blocks]
        return (self._picked @ self._residual)[:, None]

    def pull(self, blocks: Tensor, results: Tensor) -> Tensor:
        before, squares = self.coefficients[blocks], self._squares[blocks]
        wanted = results[:, 0] + squares * before
        after = torch.sign(wanted) * (wanted.abs() - self.penalty).clamp(min=0) / squares
        change = after - before
        self.coefficients[blocks] = after
        self._residual.addmv_(self._picked.t(), change, alpha=-1)
        self._slack[blocks] = (self.penalty - wanted.abs()).clamp(min=0) / squares.sqrt()
        return change.abs() * squares.sqrt()

    def urgency_increments(self, blocks: Tensor, changes: Tensor) -> tuple[Tensor, Tensor]:
        """Those that changed; and partners of theirs, by how much that may move them in turn."""
        places = changes.nonzero()[:, 0]
        if not len(places):
            return blocks, changes
        found = [self._partners_of(block) for block in blocks[places].tolist()]
        partners = np.concatenate([numbers for numbers, _ in found])
        drifts = np.concatenate([alike * far for (_, alike), far in zip(found, changes[places].tolist(), strict=True)])
        distinct, which = np.unique(partners, return_inverse=True)
        drift = np.bincount(which, drifts, minlength=len(distinct))
        slack = self._slack[distinct]
        self._slack[distinct] = np.maximum(slack - drift, 0.0)
        over = torch.from_numpy(np.maximum(drift - slack, 0.0)).to(changes)
        return torch.cat([blocks, torch.from_numpy(distinct)]), torch.cat([changes, over])

    def objective(self) -> Tensor:
        return self._residual.square().sum() / 2 + self._share * self.penalty * self.coefficients.abs().sum()

    def dependence(self, blocks: Tensor) -> Tensor:
        return torch.from_numpy(self._sketch.pairwise_similarity(blocks.numpy()))

    def operations(self, blocks: Tensor, mine: Tensor) -> float:
        searching, self._num_searches = self._num_searches * self.num_blocks * sketch.OPERATIONS, 0
        return 4.0 * len(blocks) * len(self._residual) + searching  # Features times residuals, and times changes.

    def _partners_of(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        if block not in self._partners:
            self._partners[block] = self._sketch.neighbours(block, _PARTNERS)
            self._num_searches += 1
        return self._partners[block]


def _check(features: Tensor, targets: Tensor, penalty: float, rank: int) -> None:
    mistakes = []
    if features.dim() != 2 or targets.shape != features.shape[:1] or not features.shape[1]:
        shapes = f"{tuple(features.shape)} and {tuple(targets.shape)}"
        mistakes.append(f"features must be samples by features, and targets one for each sample, got {shapes}")
    if features.device.type != "cpu" or not features.is_floating_point() or features.dtype != targets.dtype:
        kinds = f"{features.dtype} on {features.device} and {targets.dtype}"
        mistakes.append(f"features and targets must be of one floating-point dtype, on the CPU, got {kinds}")
    if not 0 <= penalty < math.inf:
        mistakes.append(f"penalty must be 0 or more and finite, got {penalty}")
    if mistakes:
        raise ConfigError(f"rank {rank}: Lasso: {'; '.join(mistakes)}.")
