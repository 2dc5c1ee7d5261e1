"""Problems for a scheduler: Lasso on correlated features, and a matrix of which some entries are known."""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tutti.parallel.scheduler import Factorisation, Lasso, Problem
from tutti.transports import Transport

NOISE = 1.0
ALIKE = 0.9
"""The correlation of a feature with the one before, where it has one."""


@dataclass(frozen=True, kw_only=True)
class LassoSize:
    """How large a Lasso problem is: features are drawn so that each is like the one before with probability a half."""

    samples: int
    features: int
    relevant: int
    """Features that count."""

    @property
    def penalty(self) -> float:
        """σ √(2 ln J), the universal one of Donoho & Johnstone (1994), for features of length 1."""
        return NOISE * math.sqrt(2 * math.log(self.features))

    @property
    def num_blocks(self) -> int:
        return self.features

    def problem(self, transport: Transport) -> Problem:
        features, targets = lasso_data(self)
        mine = slice(transport.rank, None, transport.size)
        return Lasso(features[mine], targets[mine], self.penalty, transport)


@dataclass(frozen=True, kw_only=True)
class MatrixSize:
    """How large a matrix is. Some rows and columns have many known entries and most have few, as ratings do."""

    rows: int
    columns: int
    entries: int
    rank: int = 8
    penalty: float = 2.0
    by_load: bool = True
    """Whether workers are given equal work, or equal numbers of rows."""

    @property
    def num_blocks(self) -> int:
        return self.rows + self.columns

    def problem(self, transport: Transport) -> Problem:
        kind = Factorisation if self.by_load else _ByNumber
        return kind(matrix_data(self), rank=self.rank, penalty=self.penalty, transport=transport)


class _ByNumber(Factorisation):
    """Rows count alike when they are given out, whatever work they are."""

    def loads(self, blocks: Tensor) -> Tensor:
        return torch.ones(len(blocks))

    def operations(self, blocks: Tensor, mine: Tensor) -> float:
        return float(super().loads(blocks[mine]).sum())


@cache
def lasso_data(size: LassoSize) -> tuple[Tensor, Tensor]:
    """Samples by features, each feature of length 1, and targets; the same every time."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(size.features, size.samples, generator=generator, dtype=torch.float64)
    like_the_one_before = torch.rand(size.features, generator=generator) < 0.5
    for number in like_the_one_before.nonzero()[:, 0].tolist():
        if number:
            rows[number].mul_(math.sqrt(1 - ALIKE**2)).add_(rows[number - 1], alpha=ALIKE)
    rows /= rows.norm(dim=1, keepdim=True)
    truth = torch.zeros(size.features, dtype=torch.float64)
    places = torch.randperm(size.features, generator=generator)[: size.relevant]
    truth[places] = 10 * torch.randn(size.relevant, generator=generator, dtype=torch.float64)
    noise = torch.randn(size.samples, generator=generator, dtype=torch.float64)
    return rows.t(), truth @ rows + NOISE * noise


@cache
def matrix_data(size: MatrixSize) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, columns and values of the known entries, of a matrix of low rank and noise; the same every time."""
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for number in (size.rows, size.columns):
        popularity = (1 + torch.randperm(number, generator=generator)).double() ** -0.8
        drawn.append(torch.multinomial(popularity, 2 * size.entries, replacement=True, generator=generator))
    places = torch.unique(drawn[0] * size.columns + drawn[1])
    places = places[torch.randperm(len(places), generator=generator)[: size.entries]]
    rows, columns = places // size.columns, places % size.columns
    left = torch.randn(size.rows, size.rank, generator=generator, dtype=torch.float64)
    right = torch.randn(size.columns, size.rank, generator=generator, dtype=torch.float64)
    values = (left[rows] * right[columns]).sum(1) / size.rank**0.5
    return rows, columns, values + 0.5 * torch.randn(len(rows), generator=generator, dtype=torch.float64)
