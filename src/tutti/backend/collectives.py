"""What a group can do together, over whatever joins its ranks."""

from abc import ABC, abstractmethod

from torch import Tensor

from tutti.backend.operators import ReduceOperator
from tutti.collectives import gloo_order
from tutti.transports.base import Operation

Run = tuple[int, int, int]
"""A block in Gloo's order, and from where to where it goes: in this rank's part of a reduction."""


class Collectives(ABC):
    """Every method returns steps that every rank takes. Tensors are flat, in host memory, and all of one dtype."""

    @abstractmethod
    def all_reduce(self, flat: Tensor, operator: ReduceOperator) -> Operation:
        """In place."""

    @abstractmethod
    def reduce(self, flat: Tensor, operator: ReduceOperator, root: int) -> Operation:
        """In place on `root`; elsewhere `flat` may be spoilt."""

    @abstractmethod
    def reduce_scatter(self, mine: Tensor, flat: Tensor, operator: ReduceOperator) -> Operation:
        """Reduce `flat`, and leave this rank's part of the result, which is as long as every other, in `mine`."""

    @abstractmethod
    def reduce_parts(self, mine: Tensor, parts: list[Tensor], operator: ReduceOperator) -> Operation:
        """Reduce each of `parts` by itself, and leave the result of this rank's in `mine`."""

    @abstractmethod
    def all_gather(self, everyones: list[Tensor], mine: Tensor) -> Operation:
        """Give every rank what each has."""

    @abstractmethod
    def broadcast(self, flat: Tensor, root: int) -> Operation:
        """Give every rank what `root` has."""

    @abstractmethod
    def gather(self, everyones: list[Tensor] | None, mine: Tensor, root: int) -> Operation:
        """Give `root`, which alone has `everyones`, what each rank has."""

    @abstractmethod
    def scatter(self, mine: Tensor, parts: list[Tensor] | None, root: int) -> Operation:
        """Give every rank its part of what `root`, which alone has `parts`, has."""

    @abstractmethod
    def all_to_all(self, received: list[Tensor], sent: list[Tensor]) -> Operation:
        """Give every rank its part of what each has. Parts may be of any lengths, as long as both sides know them."""

    @abstractmethod
    def barrier(self) -> Operation:
        """Wait for everyone."""


def whole_runs(flat: Tensor, size: int) -> list[Run]:
    """All of `flat`, reduced by so many ranks."""
    cut = gloo_order.blocks(flat.numel(), flat.itemsize, size)
    return [(block, part.start, part.stop) for block, part in enumerate(cut) if part.start < part.stop]


def own_runs(flat: Tensor, numel: int, rank: int, size: int) -> list[Run]:
    """Part `rank`, of `numel` elements, of the reduction of `flat`; counted from the start of that part."""
    cut, start = gloo_order.blocks(flat.numel(), flat.itemsize, size), rank * numel
    return [
        (block, first - start, last - start)
        for block, first, last in gloo_order.split_by_block(cut, start, start + numel)
    ]


def fold(out: Tensor, everyones: list[Tensor], operator: ReduceOperator, runs: list[Run]) -> None:
    """Combine what all ranks have, in Gloo's order."""
    for block, start, stop in runs:
        first, *others = gloo_order.reduction_order(block, len(everyones))
        result = everyones[first][start:stop].clone()
        for rank in others:
            operator.make(everyones[rank][start:stop], result, result)
        out[start:stop].copy_(result)
