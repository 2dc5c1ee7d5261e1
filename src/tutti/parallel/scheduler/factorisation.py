"""`Factorisation`: matrix factorisation by alternating least squares, one row of a factor at a time."""

import math

import torch
from torch import Tensor

from tutti.collectives import broadcast_all
from tutti.collectives.steps import parts
from tutti.errors import ConfigError
from tutti.parallel.scheduler.problem import BlockProblem
from tutti.transports import Transport


class Factorisation(BlockProblem):
    """Minimise Σ (a − w·h)² + λ (‖W‖² + ‖H‖²) over the known entries a of a matrix.

    A block is a row of W or of H: first the rows of the matrix, then its columns. A row of W depends on a row of H if
    their entry is known. The work of a block is given by the number of its entries. Every rank has all entries, and
    computes the rows that are assigned to it.

    Args:
        entries: rows, columns and values of the known entries, the same on every rank, on the CPU.
        rank: rank of the factors.
        penalty: λ.
        transport: to the other ranks. Collective.
        seed: seed of the initial factors; those of rank 0 are used.
    """

    def __init__(
        self, entries: tuple[Tensor, Tensor, Tensor], *, rank: int, penalty: float, transport: Transport, seed: int = 0
    ) -> None:
        rows, columns, self._values = entries
        _check(entries, rank, penalty, transport.world_rank)
        self.num_rows, self.num_columns = int(rows.max()) + 1, int(columns.max()) + 1
        self.num_blocks = self.num_rows + self.num_columns
        self.width = rank
        self.penalty = penalty
        # Each entry belongs to two blocks. Both copies are sorted by block, so that a block's entries lie together.
        entry_blocks = torch.stack([rows, columns + self.num_rows])
        order = torch.argsort(entry_blocks.view(-1), stable=True)
        self._partners = entry_blocks.flip(0).view(-1)[order]
        """The other block of each entry."""
        self._known = self._values.repeat(2)[order]
        self._counts = torch.bincount(entry_blocks.view(-1), minlength=self.num_blocks)
        self._starts = torch.cumsum(self._counts, 0) - self._counts
        # Products w·h of such rows have the variance 1/r, whatever the rank.
        generator = torch.Generator().manual_seed(seed)
        self.factors = torch.randn(self.num_blocks, rank, generator=generator, dtype=self._values.dtype) / rank**0.5
        """The rows of W, then those of H; the same on every rank."""
        broadcast_all([self.factors], transport)
        # The errors are divided between ranks, though every rank has all factors.
        local = parts(len(rows), transport.size)[transport.rank]
        self._local_entries = entry_blocks[:, local], self._values[local]
        """The entries whose errors this rank adds to the objective."""
        self._share = 1.0 / transport.size
        self._identity = penalty * torch.eye(rank, dtype=self._values.dtype)

    def push(self, blocks: Tensor, mine: Tensor) -> Tensor:
        results = torch.zeros(len(blocks), self.width, dtype=self.factors.dtype)
        entries, owners = self._entries_of(blocks[mine])
        # The normal equations of all assigned blocks at once: (λ I + Σ h hᵀ) w = Σ a h.
        others = self.factors[self._partners[entries]]
        products = others[:, :, None] * others[:, None, :]
        left = self._identity.repeat(len(mine), 1, 1).index_add_(0, owners, products)
        right = torch.zeros(len(mine), self.width, dtype=results.dtype)
        right.index_add_(0, owners, others * self._known[entries, None])
        # λ > 0 makes every system positive definite, also that of a block without entries.
        results[mine] = torch.linalg.solve(left, right)
        return results

    def pull(self, blocks: Tensor, results: Tensor) -> Tensor:
        changes = (results - self.factors[blocks]).abs().amax(1)
        # The sum over ranks is the row itself: one rank computed it and the others left zeros.
        self.factors[blocks] = results
        return changes

    def urgency_increments(self, blocks: Tensor, changes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the partners of changed blocks, by the change over the root of their number of entries.

        The changed blocks themselves are at their optimum.
        """
        entries, owners = self._entries_of(blocks)
        partners = self._partners[entries]
        return partners, changes[owners] / self._counts[partners].sqrt()

    def objective(self) -> Tensor:
        (rows, columns), values = self._local_entries
        errors = values - (self.factors[rows] * self.factors[columns]).sum(1)
        return errors.square().sum() + self._share * self.penalty * self.factors.square().sum()

    def dependence(self, blocks: Tensor) -> Tensor:
        index_of = torch.full((self.num_blocks,), -1)  # -1: not one of the candidates.
        index_of[blocks] = torch.arange(len(blocks))
        entries, owners = self._entries_of(blocks)
        others = index_of[self._partners[entries]]
        depends = torch.zeros(len(blocks), len(blocks))
        depends[owners[others >= 0], others[others >= 0]] = 1.0
        return depends

    def loads(self, blocks: Tensor) -> Tensor:
        # The products h hᵀ of all entries, and about r³ for the solution.
        return 2.0 * self.width**2 * self._counts[blocks] + self.width**3

    def _entries_of(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices of the entries of `blocks`, block by block, and the index of the block of each."""
        counts = self._counts[blocks]
        owners = torch.repeat_interleave(torch.arange(len(blocks)), counts)
        before = torch.cumsum(counts, 0) - counts
        # An entry lies at the start of its block in the sorted order, plus its place within the block.
        return torch.arange(len(owners)) + (self._starts[blocks] - before)[owners], owners


def _check(entries: tuple[Tensor, Tensor, Tensor], rank: int, penalty: float, world_rank: int) -> None:
    rows, columns, values = entries
    mistakes = []
    if not (rows.dim() == 1 and rows.shape == columns.shape == values.shape and len(rows)):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in entries)
        mistakes.append(f"rows, columns and values must be of one length, above 0, got {shapes}")
    elif rows.dtype != torch.int64 or columns.dtype != torch.int64 or not values.is_floating_point():
        dtypes = ", ".join(str(tensor.dtype) for tensor in entries)
        mistakes.append(f"rows and columns must be int64 and values floating-point, got {dtypes}")
    elif min(int(rows.min()), int(columns.min())) < 0:
        mistakes.append("rows and columns count from 0, got negative ones")
    if rank < 1:
        mistakes.append(f"rank must be 1 or more, got {rank}")
    if not 0 < penalty < math.inf:
        mistakes.append(f"penalty must be above 0 and finite, got {penalty}")
    if mistakes:
        raise ConfigError(f"rank {world_rank}: Factorisation: {'; '.join(mistakes)}.")
