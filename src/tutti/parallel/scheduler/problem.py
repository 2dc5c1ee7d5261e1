"""`BlockProblem`: the interface of a model whose blocks of parameters a scheduler updates."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class BlockProblem(ABC):
    """A model in blocks, and this rank's part of the data. In every round a scheduler chooses blocks to be updated.

    Parameters are the same on every rank. So `pull` must compute the same bits from the same results, and the methods
    that guide the scheduler must return the same bits on every rank. Blocks are passed as tensors of their numbers.
    """

    num_blocks: int
    """Number of blocks."""
    width: int = 1
    """Number of values that `push` returns for each block."""
    pair_operations: float = 1.0
    """Operations of `dependence` for a pair of blocks, for virtual time."""

    @abstractmethod
    def push(self, blocks: Tensor, mine: Tensor) -> Tensor:
        """Return this rank's part of the updates of `blocks`: a row of `width` values each. Rows are summed over ranks.

        If ranks hold different data, each adds its part to every row. If every rank could compute any block (`loads` is
        not None), it computes the rows with the indices `mine`, which the scheduler assigns to it, and leaves the
        others 0.
        """

    @abstractmethod
    def pull(self, blocks: Tensor, results: Tensor) -> Tensor:
        """Apply the summed results to `blocks`, and return how much each block changed: 0 or more."""

    @abstractmethod
    def objective(self) -> Tensor:
        """Return this rank's part of the objective as one value: parts are summed over ranks."""

    def urgency_increments(self, blocks: Tensor, changes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the blocks that became more urgent by the `changes` of `blocks`, and by how much each.

        Called after `pull` for selection rules that use urgency. An update sets the urgency of a block to 0 first. By
        default a block is as urgent as its last change was large.
        """
        return blocks, changes

    def dependence(self, blocks: Tensor) -> Tensor:
        """Return how much each pair of `blocks` depends on one another, from 0 to 1. By default nothing depends."""
        return torch.zeros(len(blocks), len(blocks))

    def loads(self, blocks: Tensor) -> Tensor | None:
        """Return the work of each block for the rank that computes it; None if all ranks take part in every block."""
        return None

    def operations(self, blocks: Tensor, mine: Tensor) -> float:
        """Return this rank's floating-point operations in a round, for virtual time. By default its loads."""
        loads = self.loads(blocks[mine])
        return 0.0 if loads is None else float(loads.sum())
