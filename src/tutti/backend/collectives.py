"""What a group can do together, over whatever joins its ranks."""

from abc import ABC, abstractmethod

from torch import Tensor

from tutti.backend.operators import Operator
from tutti.transports.base import Steps

Run = tuple[int, int, int]
"""A block in Gloo's order, and from where to where it goes: in this rank's part of a reduction."""


class Collectives(ABC):
    """Every method returns steps that every rank takes. Tensors are flat, in host memory, and all of one dtype."""

    @abstractmethod
    def all_reduce(self, flat: Tensor, operator: Operator) -> Steps:
        """In place."""

    @abstractmethod
    def reduce(self, flat: Tensor, operator: Operator, root: int) -> Steps:
        """In place on `root`; elsewhere `flat` may be spoilt."""

    @abstractmethod
    def reduce_scatter(self, mine: Tensor, parts: list[Tensor], operator: Operator, runs: list[Run]) -> Steps:
        """Reduce every rank's part, and leave this rank's in `mine`, combined as `runs` of it say."""

    @abstractmethod
    def all_gather(self, everyones: list[Tensor], mine: Tensor) -> Steps:
        """Give every rank what each has."""

    @abstractmethod
    def broadcast(self, flat: Tensor, root: int) -> Steps:
        """Give every rank what `root` has."""

    @abstractmethod
    def gather(self, everyones: list[Tensor] | None, mine: Tensor, root: int) -> Steps:
        """Give `root`, which alone has `everyones`, what each rank has."""

    @abstractmethod
    def scatter(self, mine: Tensor, parts: list[Tensor] | None, root: int) -> Steps:
        """Give every rank its part of what `root`, which alone has `parts`, has."""

    @abstractmethod
    def all_to_all(self, received: list[Tensor], sent: list[Tensor]) -> Steps:
        """Give every rank its part of what each has. Parts may be of any lengths, as long as both sides know them."""

    @abstractmethod
    def barrier(self) -> Steps:
        """Wait for everyone."""
