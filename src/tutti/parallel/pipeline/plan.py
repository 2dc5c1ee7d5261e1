"""Which stages a pipeline has, what each does when, and what goes from whom to whom."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tutti.parallel.pipeline.measure import LayerCost
from tutti.parallel.pipeline.schedules import Action, StageMessage

Shapes = Sequence[tuple[tuple[int, ...], str]]
"""Shape and dtype of each tensor that goes together."""


@dataclass(frozen=True)
class PipelinePlan:
    """The same on all ranks along `pipe`. Stage s is on rank s modulo their number."""

    actions_by_rank: Sequence[Sequence[Action]]
    """By rank."""
    costs: Sequence[LayerCost]
    """By stage."""
    num_microbatches: int
    num_samples: int | None = None
    """Of every batch; None where any will do."""

    @property
    def num_ranks(self) -> int:
        return len(self.actions_by_rank)

    @property
    def num_stages(self) -> int:
        return len(self.costs)

    def seconds(self, action: Action) -> float:
        """What an action takes, as its stage's layers took alone; each half of a backward pass takes half."""
        cost = self.costs[action.stage]
        return cost.forward_s if action.kind == "F" else cost.backward_s / (1 if action.kind == "B" else 2)

    def messages(self) -> Iterator[StageMessage]:
        """All that goes from one rank to another in a step, numbered by the order."""
        for actions in self.actions_by_rank:
            for action in actions:
                message = action.output_message(self.num_stages)
                if message is not None and self.sender(message) != self.receiver(message):
                    yield message

    def sender(self, message: StageMessage) -> int:
        return message.stage % self.num_ranks

    def receiver(self, message: StageMessage) -> int:
        return (message.stage + (1 if message.direction == "forward" else -1)) % self.num_ranks

    def shapes(self, message: StageMessage) -> Shapes:
        """What is in it: gradients are as what they are of."""
        return self.costs[message.stage if message.direction == "forward" else message.stage - 1].output_shapes
