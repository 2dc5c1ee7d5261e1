"""`PipelinePlan`: the stages of a pipeline, the actions of every rank, and the messages between them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tutti.parallel.pipeline.measure import LayerCost
from tutti.parallel.pipeline.schedules import Action, StageMessage

TensorShapes = Sequence[tuple[tuple[int, ...], str]]
"""Shape and dtype of each tensor of a message."""


@dataclass(frozen=True)
class PipelinePlan:
    """The plan of one pipeline, the same on all ranks along `pipe`. Stage s is on rank s modulo their number."""

    actions_by_rank: Sequence[Sequence[Action]]
    """The actions of each rank, in the order in which it performs them."""
    costs: Sequence[LayerCost]
    """The cost of each stage, for one microbatch."""
    num_microbatches: int
    """Number of microbatches of a batch."""
    num_samples: int | None = None
    """Number of samples that every batch must have; None if any number will do."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks along `pipe`."""
        return len(self.actions_by_rank)

    @property
    def num_stages(self) -> int:
        """Number of stages on all ranks."""
        return len(self.costs)

    def seconds(self, action: Action) -> float:
        """Return the measured seconds of an action; half of a backward pass takes half its time."""
        cost = self.costs[action.stage]
        return cost.forward_s if action.kind == "F" else cost.backward_s / (1 if action.kind == "B" else 2)

    def messages(self) -> Iterator[StageMessage]:
        """Yield every message between two ranks in a step, always in the same order."""
        for actions in self.actions_by_rank:
            for action in actions:
                message = action.output_message(self.num_stages)
                # Stages of one rank hand their tensors over without a message.
                if message is not None and self.sender(message) != self.receiver(message):
                    yield message

    def sender(self, message: StageMessage) -> int:
        """Return the rank along `pipe` that sends a message."""
        return message.stage % self.num_ranks

    def receiver(self, message: StageMessage) -> int:
        """Return the rank along `pipe` that receives a message."""
        # Activations go to the next stage and gradients to the one before, which is on the next or previous rank,
        # around the ring.
        return (message.stage + (1 if message.direction == "forward" else -1)) % self.num_ranks

    def shapes(self, message: StageMessage) -> TensorShapes:
        """Return shapes and dtypes of a message's tensors; gradients have those of the activations they belong to."""
        return self.costs[message.stage if message.direction == "forward" else message.stage - 1].output_shapes
