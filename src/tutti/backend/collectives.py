"""The collectives of a process group: their interface, and reduction in Gloo's order.

Every implementation reduces in the order in which Gloo would, block by block. So results are the same bits whatever
joins the ranks, and the same as Gloo's.
"""

from abc import ABC, abstractmethod

from torch import Tensor

from tutti.backend.operators import ReduceOperator
from tutti.collectives import gloo_order
from tutti.transports.base import Operation

BlockRange = tuple[int, int, int]
"""A block of Gloo's order, and the start and stop of the elements of a tensor that lie in it."""


class Collectives(ABC):
    """Collectives as operations that every rank runs. Tensors are flat, on the CPU, and of one dtype on all ranks."""

    @abstractmethod
    def all_reduce(self, flat: Tensor, operator: ReduceOperator) -> Operation:
        """Reduce `flat` over ranks, in place."""

    @abstractmethod
    def reduce(self, flat: Tensor, operator: ReduceOperator, root: int) -> Operation:
        """Reduce `flat` over ranks, in place on `root`; on other ranks it is undefined afterwards."""

    @abstractmethod
    def reduce_scatter(self, output: Tensor, flat: Tensor, operator: ReduceOperator) -> Operation:
        """Reduce `flat` over ranks and leave this rank's part of the result in `output`. All parts are equally long."""

    @abstractmethod
    def reduce_parts(self, output: Tensor, parts: list[Tensor], operator: ReduceOperator) -> Operation:
        """Reduce each of `parts` by itself, one for each rank, and leave the result of this rank's in `output`."""

    @abstractmethod
    def all_gather(self, outputs: list[Tensor], flat: Tensor) -> Operation:
        """Copy every rank's `flat` to `outputs`, by rank, on every rank."""

    @abstractmethod
    def broadcast(self, flat: Tensor, root: int) -> Operation:
        """Overwrite `flat` on every rank with that of `root`."""

    @abstractmethod
    def gather(self, outputs: list[Tensor] | None, flat: Tensor, root: int) -> Operation:
        """Copy every rank's `flat` to `outputs` on `root`; `outputs` is None on other ranks."""

    @abstractmethod
    def scatter(self, output: Tensor, parts: list[Tensor] | None, root: int) -> Operation:
        """Copy one of `parts` on `root` to `output` of each rank; `parts` is None on other ranks."""

    @abstractmethod
    def all_to_all(self, outputs: list[Tensor], inputs: list[Tensor]) -> Operation:
        """Copy `inputs[j]` of rank i to `outputs[i]` of rank j. Lengths may differ, as long as both sides know them."""

    @abstractmethod
    def barrier(self) -> Operation:
        """Wait until every rank has come here."""


def all_ranges(flat: Tensor, size: int) -> list[BlockRange]:
    """The ranges of Gloo's blocks in the reduction of `flat` over `size` ranks."""
    blocks = gloo_order.blocks(flat.numel(), flat.itemsize, size)
    # With few elements some of Gloo's blocks are empty, which the kernels need not see.
    return [(block, part.start, part.stop) for block, part in enumerate(blocks) if part.start < part.stop]


def part_ranges(flat: Tensor, numel: int, rank: int, size: int) -> list[BlockRange]:
    """The ranges in part `rank`, of `numel` elements, of the reduction of `flat`, counted from the part's start."""
    # Blocks are those of the whole tensor, of which a part may begin and end within any: Gloo would reduce all of it.
    blocks, start = gloo_order.blocks(flat.numel(), flat.itemsize, size), rank * numel
    ranges = gloo_order.split_by_block(blocks, start, start + numel)
    return [(block, first - start, last - start) for block, first, last in ranges]


def reduce_in_gloo_order(
    output: Tensor, inputs: list[Tensor], operator: ReduceOperator, ranges: list[BlockRange]
) -> None:
    """Reduce `inputs`, one per rank, into `output`, each block in the order in which Gloo's ring would."""
    for block, start, stop in ranges:
        first, *others = gloo_order.reduction_order(block, len(inputs))
        result = inputs[first][start:stop].clone()
        for rank in others:
            # The rank's tensor comes first and the partial result second, as in Gloo: for NaN the order matters.
            operator.apply(inputs[rank][start:stop], result, result)
        output[start:stop].copy_(result)
