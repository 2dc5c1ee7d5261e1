"""Problems for the scheduler: Lasso with correlated features, and a matrix with some known entries."""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tutti.parallel.scheduler import BlockProblem, Factorisation, Lasso
from tutti.transports import Transport

NOISE = 1.0
CORRELATION = 0.9
"""Correlation of a feature with the previous one, where there is one."""


@dataclass(frozen=True, kw_only=True)
class LassoSize:
    """Size of a Lasso problem, in which a random half of the features correlate with their predecessor."""

    samples: int
    features: int
    relevant: int
    """Number of features with a coefficient other than 0."""

    @property
    def penalty(self) -> float:
        """σ √(2 ln J), the universal penalty of Donoho & Johnstone (1994) for features of length 1."""
        return NOISE * math.sqrt(2 * math.log(self.features))

    @property
    def num_blocks(self) -> int:
        """Number of coefficients."""
        return self.features

    def problem(self, transport: Transport) -> BlockProblem:
        """Return the problem with this rank's samples."""
        features, targets = lasso_data(self)
        local = slice(transport.rank, None, transport.size)
        return Lasso(features[local], targets[local], self.penalty, transport)


@dataclass(frozen=True, kw_only=True)
class MatrixSize:
    """Size of a matrix; a few rows and columns have many known entries and most have few, like ratings."""

    rows: int
    columns: int
    entries: int
    rank: int = 8
    penalty: float = 2.0
    balanced: bool = True
    """Whether workers receive equal amounts of work, or equal numbers of rows."""

    @property
    def num_blocks(self) -> int:
        """Number of rows of both factors."""
        return self.rows + self.columns

    def problem(self, transport: Transport) -> BlockProblem:
        """Return the problem, of which every rank knows all entries."""
        kind = Factorisation if self.balanced else _BalancedByNumber
        return kind(matrix_data(self), rank=self.rank, penalty=self.penalty, transport=transport)


class _BalancedByNumber(Factorisation):
    """A factorisation whose rows all count as the same amount of work when they are distributed."""

    def loads(self, blocks: Tensor) -> Tensor:
        """Return the same amount of work for all rows."""
        return torch.ones(len(blocks))

    def operations(self, blocks: Tensor, mine: Tensor) -> float:
        """Return the real amount of work, which takes virtual time."""
        return float(super().loads(blocks[mine]).sum())


@cache
def lasso_data(size: LassoSize) -> tuple[Tensor, Tensor]:
    """Return samples by features, every feature of length 1, and targets; the same in every call."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(size.features, size.samples, generator=generator, dtype=torch.float64)
    correlated = torch.rand(size.features, generator=generator) < 0.5
    for number in correlated.nonzero()[:, 0].tolist():
        if number:
            rows[number].mul_(math.sqrt(1 - CORRELATION**2)).add_(rows[number - 1], alpha=CORRELATION)
    rows /= rows.norm(dim=1, keepdim=True)
    coefficients = torch.zeros(size.features, dtype=torch.float64)
    indices = torch.randperm(size.features, generator=generator)[: size.relevant]
    coefficients[indices] = 10 * torch.randn(size.relevant, generator=generator, dtype=torch.float64)
    noise = torch.randn(size.samples, generator=generator, dtype=torch.float64)
    return rows.t(), coefficients @ rows + NOISE * noise


@cache
def matrix_data(size: MatrixSize) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, columns and values of the known entries of a low-rank matrix with noise; always the same."""
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for number in (size.rows, size.columns):
        popularity = (1 + torch.randperm(number, generator=generator)).double() ** -0.8
        drawn.append(torch.multinomial(popularity, 2 * size.entries, replacement=True, generator=generator))
    indices = torch.unique(drawn[0] * size.columns + drawn[1])
    indices = indices[torch.randperm(len(indices), generator=generator)[: size.entries]]
    rows, columns = indices // size.columns, indices % size.columns
    left = torch.randn(size.rows, size.rank, generator=generator, dtype=torch.float64)
    right = torch.randn(size.columns, size.rank, generator=generator, dtype=torch.float64)
    values = (left[rows] * right[columns]).sum(1) / size.rank**0.5
    return rows, columns, values + 0.5 * torch.randn(len(rows), generator=generator, dtype=torch.float64)
