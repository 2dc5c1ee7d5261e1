"""What a scheduler knows of the model that it schedules: all that a new problem has to say."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class BlockProblem(ABC):
    """A model in blocks, and this rank's part of the data. In every round a scheduler picks blocks to be updated.

    Parameters are the same on every rank: what `pull` makes of the same results must be the same, to the bit. Blocks
    are given and returned as tensors of their numbers.
    """

    num_blocks: int
    width: int = 1
    """How many numbers `push` says of a block."""
    pair_operations: float = 1.0
    """What `dependence` takes for a pair of blocks, in virtual time."""

    @abstractmethod
    def push(self, blocks: Tensor, mine: Tensor) -> Tensor:
        """What this rank has found for `blocks`: a row of `width` numbers for each. Rows are summed over ranks.

        Where ranks hold different data, each adds its part to every row. Where every rank could do any block (it says
        `loads`), it does the rows `mine`, which the scheduler gave to it, and leaves the others 0.
        """

    @abstractmethod
    def pull(self, blocks: Tensor, results: Tensor) -> Tensor:
        """Commit the sums of what ranks pushed. How much each block changed by that: 0 or more."""

    @abstractmethod
    def objective(self) -> Tensor:
        """This rank's part of what is minimised, as one number: parts are summed over ranks."""

    def urgency_increments(self, blocks: Tensor, changes: Tensor) -> tuple[Tensor, Tensor]:
        """Which blocks are more urgent now that these have changed so much, and by how much each is: these are.

        Asked after `pull`, by orders that go by urgency. A block that was just updated is not urgent but for this.
        """
        return blocks, changes

    def dependence(self, blocks: Tensor) -> Tensor:
        """How much each pair of `blocks` depends on one another, from 0 to 1, the same on every rank: not at all."""
        return torch.zeros(len(blocks), len(blocks))

    def loads(self, blocks: Tensor) -> Tensor | None:
        """How much work each block is, for the rank that is given it. None: every rank has a part in all of them."""
        return None

    def operations(self, blocks: Tensor, mine: Tensor) -> float:
        """Floating-point operations of this rank in a round, for virtual time: the loads of the blocks given to it."""
        loads = self.loads(blocks[mine])
        return 0.0 if loads is None else float(loads.sum())
