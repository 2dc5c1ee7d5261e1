"""Matrix factorisation by alternating least squares, a row of either factor at a time."""

import math

import torch
from torch import Tensor

from tutti.collectives import broadcast_all
from tutti.collectives.steps import parts
from tutti.errors import ConfigError
from tutti.parallel.scheduler.problem import BlockProblem
from tutti.transports import Transport


class Factorisation(BlockProblem):
    """Minimise Σ (a − w·h)² + λ (‖W‖² + ‖H‖²) over the entries of a matrix that are known.

    A block is a row of W or of H: first those of all rows of the matrix, then those of its columns. A row of W depends
    on a row of H if their entry is known; how much work it is, on how many are. Every rank has all entries, and finds
    the rows that it is given.

    Args:
        rows, columns, values: of the known entries, the same on every rank, on the CPU.
        rank: of the factors.
        penalty: λ.
        transport: to the other ranks. Collective.
        seed: of what the factors are at first, which is rank 0's.
    """

    def __init__(
        self, entries: tuple[Tensor, Tensor, Tensor], *, rank: int, penalty: float, transport: Transport, seed: int = 0
    ) -> None:
        rows, columns, self._values = entries
        _check(entries, rank, penalty, transport.rank)
        self.num_rows, self.num_columns = int(rows.max()) + 1, int(columns.max()) + 1
        self.num_blocks = self.num_rows + self.num_columns
        self.width = rank
        self.penalty = penalty
        ends = torch.stack([rows, columns + self.num_rows])
        order = torch.argsort(ends.view(-1), stable=True)
        self._partners = ends.flip(0).view(-1)[order]
        self._known = self._values.repeat(2)[order]
        self._counts = torch.bincount(ends.view(-1), minlength=self.num_blocks)
        self._starts = torch.cumsum(self._counts, 0) - self._counts
        generator = torch.Generator().manual_seed(seed)
        self.factors = torch.randn(self.num_blocks, rank, generator=generator, dtype=self._values.dtype) / rank**0.5
        broadcast_all([self.factors], transport)
        self._mine = (ends[:, (part := parts(len(rows), transport.size)[transport.rank])], self._values[part])
        self._share = 1.0 / transport.size
        self._identity = penalty * torch.eye(rank, dtype=self._values.dtype)

    def push(self, blocks: Tensor, mine: Tensor) -> Tensor:
        found = torch.zeros(len(blocks), self.width, dtype=self.factors.dtype)
        places, owners = self._entries_of(blocks[mine])
        others = self.factors[self._partners[places]]
        products = others[:, :, None] * others[:, None, :]
        left = self._identity.repeat(len(mine), 1, 1).index_add_(0, owners, products)
        right = torch.zeros(len(mine), self.width, dtype=found.dtype)
        right.index_add_(0, owners, others * self._known[places, None])
        found[mine] = torch.linalg.solve(left, right)
        return found

    def pull(self, blocks: Tensor, results: Tensor) -> Tensor:
        changes = (results - self.factors[blocks]).abs().amax(1)
        self.factors[blocks] = results
        return changes

    def urgency_increments(self, blocks: Tensor, changes: Tensor) -> tuple[Tensor, Tensor]:
        """Partners of those that changed, which are at their best themselves: by the root of what is to be gained."""
        places, owners = self._entries_of(blocks)
        partners = self._partners[places]
        return partners, changes[owners] / self._counts[partners].sqrt()

    def objective(self) -> Tensor:
        (rows, columns), values = self._mine
        errors = values - (self.factors[rows] * self.factors[columns]).sum(1)
        return errors.square().sum() + self._share * self.penalty * self.factors.square().sum()

    def dependence(self, blocks: Tensor) -> Tensor:
        place_of = torch.full((self.num_blocks,), -1)
        place_of[blocks] = torch.arange(len(blocks))
        places, owners = self._entries_of(blocks)
        others = place_of[self._partners[places]]
        depends = torch.zeros(len(blocks), len(blocks))
        depends[owners[others >= 0], others[others >= 0]] = 1.0
        return depends

    def loads(self, blocks: Tensor) -> Tensor:
        return 2.0 * self.width**2 * self._counts[blocks] + self.width**3

    def _entries_of(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Where entries of these blocks are, one block's after the other's, and which block each is of."""
        counts = self._counts[blocks]
        owners = torch.repeat_interleave(torch.arange(len(blocks)), counts)
        before = torch.cumsum(counts, 0) - counts
        return torch.arange(len(owners)) + (self._starts[blocks] - before)[owners], owners


def _check(entries: tuple[Tensor, Tensor, Tensor], rank: int, penalty: float, me: int) -> None:
    rows, columns, values = entries
    mistakes = []
    if not (rows.dim() == 1 and rows.shape == columns.shape == values.shape and len(rows)):
        shapes = ", ".join(str(tuple(each.shape)) for each in entries)
        mistakes.append(f"rows, columns and values must be of one length, above 0, got {shapes}")
    elif rows.dtype != torch.int64 or columns.dtype != torch.int64 or not values.is_floating_point():
        kinds = ", ".join(str(each.dtype) for each in entries)
        mistakes.append(f"rows and columns must be int64 and values floating-point, got {kinds}")
    elif min(int(rows.min()), int(columns.min())) < 0:
        mistakes.append("rows and columns count from 0")
    if rank < 1:
        mistakes.append(f"rank must be 1 or more, got {rank}")
    if not 0 < penalty < math.inf:
        mistakes.append(f"penalty must be above 0 and finite, got {penalty}")
    if mistakes:
        raise ConfigError(f"rank {me}: Factorisation: {'; '.join(mistakes)}.")
