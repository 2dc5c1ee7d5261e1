"""`Lasso`: coordinate descent in which every rank holds all features of some samples."""

import math

import numpy as np
import torch
from torch import Tensor

from tutti.errors import ConfigError
from tutti.parallel.scheduler import sketch
from tutti.parallel.scheduler.problem import BlockProblem
from tutti.parallel.scheduler.sums import sum_function
from tutti.transports import Transport

_NEIGHBOUR_CORRELATION = 0.3
"""A change of a coefficient raises the urgency of features whose correlation with its own is above this."""


class Lasso(BlockProblem):
    """Minimise ½ ‖y − X β‖² + λ ‖β‖₁. A block is one coefficient; blocks depend on one another by correlation.

    Correlations of features are estimated with a `SimHash` that every rank has: to compute them would take longer than
    the updates that they are for. A change makes urgent the coefficient itself, and coefficients of correlated
    features by how far the change may have moved them. One that is 0 is not urgent until changes add up to its
    distance from λ.

    Args:
        features: this rank's rows of X, samples x features, on the CPU.
        targets: this rank's part of y.
        penalty: λ.
        transport: to the ranks that have the other rows. Collective.
    """

    pair_operations = sketch.OPERATIONS

    def __init__(self, features: Tensor, targets: Tensor, penalty: float, transport: Transport) -> None:
        _check(features, targets, penalty, transport.world_rank)
        sum_over_ranks = sum_function(transport)
        self.num_blocks = features.shape[1]
        self.coefficients = torch.zeros(self.num_blocks, dtype=features.dtype)
        """β, the same on every rank."""
        self.penalty = penalty
        self._features = features.t().contiguous()  # Transposed, so that the values of a feature lie together.
        self._residual = targets.clone()
        self._share = 1.0 / transport.size
        squares = self._features.square().sum(1)
        sum_over_ranks(squares)
        self._squares = squares.clamp_(min=torch.finfo(squares.dtype).tiny)  # Features of zeros are divided by it.
        # Each rank projects its samples on directions of its own; the sum is the projection of whole features.
        generator = torch.Generator().manual_seed(transport.rank)
        projected = self._features @ torch.randn(
            len(targets), sketch.NUM_BITS, generator=generator, dtype=features.dtype
        )
        sum_over_ranks(projected)
        self._sketch = sketch.SimHash(projected)
        self._neighbours: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        """Correlated features of those that have changed, found once for each."""
        self._slack = np.zeros(self.num_blocks)
        """The change of its gradient after which a coefficient that is 0 becomes another value."""
        self._num_searches = 0

    def push(self, blocks: Tensor, mine: Tensor) -> Tensor:
        # Kept for the `pull` of this round, which needs the same rows.
        self._selected = self._features[blocks]
        return (self._selected @ self._residual)[:, None]

    def pull(self, blocks: Tensor, results: Tensor) -> Tensor:
        before, squares = self.coefficients[blocks], self._squares[blocks]
        # The summed results are x·r over all samples. With its own share added back, this is the correlation of a
        # feature with what the other features leave unexplained.
        unpenalised = results[:, 0] + squares * before
        # Soft threshold: the minimum over one coefficient, with the others fixed.
        after = torch.sign(unpenalised) * (unpenalised.abs() - self.penalty).clamp(min=0) / squares
        change = after - before
        self.coefficients[blocks] = after
        self._residual.addmv_(self._selected.t(), change, alpha=-1)
        # 0 where the coefficient is not 0: any drift moves such a one.
        self._slack[blocks] = (self.penalty - unpenalised.abs()).clamp(min=0) / squares.sqrt()
        # In units of the prediction, not of the coefficient, so that features of different scales compare.
        return change.abs() * squares.sqrt()

    def urgency_increments(self, blocks: Tensor, changes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the blocks that changed, and correlated ones, by how far the changes may have moved them."""
        indices = changes.nonzero()[:, 0]
        if not len(indices):
            return blocks, changes
        found = [self._neighbours_of(block) for block in blocks[indices].tolist()]
        neighbours = np.concatenate([numbers for numbers, _ in found])
        drifts = np.concatenate(
            [similarity * change for (_, similarity), change in zip(found, changes[indices].tolist(), strict=True)]
        )
        # A block may be correlated with several that changed: its drifts add up.
        distinct, inverse = np.unique(neighbours, return_inverse=True)
        drift = np.bincount(inverse, drifts, minlength=len(distinct))
        # Drift uses up the slack first; only what exceeds it can move a coefficient away from 0.
        slack = self._slack[distinct]
        self._slack[distinct] = np.maximum(slack - drift, 0.0)
        excess = torch.from_numpy(np.maximum(drift - slack, 0.0)).to(changes)
        return torch.cat([blocks, torch.from_numpy(distinct)]), torch.cat([changes, excess])

    def objective(self) -> Tensor:
        return self._residual.square().sum() / 2 + self._share * self.penalty * self.coefficients.abs().sum()

    def dependence(self, blocks: Tensor) -> Tensor:
        return torch.from_numpy(self._sketch.pairwise_similarity(blocks.numpy()))

    def operations(self, blocks: Tensor, mine: Tensor) -> float:
        searches, self._num_searches = self._num_searches * self.num_blocks * sketch.OPERATIONS, 0
        return 4.0 * len(blocks) * len(self._residual) + searches  # Features times residuals, and times changes.

    def _neighbours_of(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        if block not in self._neighbours:
            self._neighbours[block] = self._sketch.neighbours(block, _NEIGHBOUR_CORRELATION)
            self._num_searches += 1
        return self._neighbours[block]


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
