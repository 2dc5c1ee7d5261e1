"""Which stages a pipeline has, what each does when, and what goes from whom to whom."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tutti.parallel.pipeline.measure import LayerCost
from tutti.parallel.pipeline.order import Action, Parcel

Shapes = Sequence[tuple[tuple[int, ...], str]]
"""Shape and dtype of each tensor that goes together."""


@dataclass(frozen=True)
class StagePlan:
    """The same on all ranks along `pipe`. Stage s is on rank s modulo their number."""

    orders: Sequence[Sequence[Action]]
    """By rank."""
    costs: Sequence[LayerCost]
    """By stage."""
    num_microbatches: int
    num_samples: int | None = None
    """Of every batch; None where any will do."""

    @property
    def num_ranks(self) -> int:
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        return len(self.costs)

    def seconds(self, action: Action) -> float:
        """What an action takes, as its stage's layers took alone; each half of a backward pass takes half."""
        cost = self.costs[action.stage]
        return cost.forward_s if action.kind == "F" else cost.backward_s / (1 if action.kind == "B" else 2)

    def parcels(self) -> Iterator[Parcel]:
        """All that goes from one rank to another in a step, numbered by the order."""
        for actions in self.orders:
            for action in actions:
                parcel = action.gives(self.num_stages)
                if parcel is not None and self.sender(parcel) != self.receiver(parcel):
                    yield parcel

    def sender(self, parcel: Parcel) -> int:
        return parcel.stage % self.num_ranks

    def receiver(self, parcel: Parcel) -> int:
        return (parcel.stage + (1 if parcel.way == "forward" else -1)) % self.num_ranks

    def shapes(self, parcel: Parcel) -> Shapes:
        """What is in it: gradients are as what they are of."""
        return self.costs[parcel.stage if parcel.way == "forward" else parcel.stage - 1].gives
