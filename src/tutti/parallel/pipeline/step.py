"""A training step through the pipeline: what replaces the forward and backward lines of a script."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tutti.collectives import gather_json
from tutti.parallel.pipeline.measure import LayerCost
from tutti.parallel.pipeline.microbatches import microbatches
from tutti.parallel.pipeline.order import Action
from tutti.parallel.pipeline.timeline import Span, Timeline
from tutti.parallel.pipeline.wires import Arriving, Shapes, Wires
from tutti.parallel.pipeline.work import StageWork, Tensors
from tutti.replica import HookedReplica

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class StagePlan:
    """Which stages there are, and what each does when."""

    orders: Sequence[Sequence[Action]]
    """By rank."""
    gives: Sequence[Shapes]
    """By stage, what it gives the next."""
    costs: Sequence[LayerCost]
    """By stage."""
    num_microbatches: int

    @property
    def num_stages(self) -> int:
        return len(self.gives)

    def seconds(self, action: Action) -> float:
        """What an action takes, as its stage's layers took alone; each half of a backward pass takes half."""
        cost = self.costs[action.stage]
        return cost.forward_s if action.kind == "F" else cost.backward_s / (1 if action.kind == "B" else 2)


class PipelineStep:
    """`loss = pipeline(x, y)`: forward and backward of one batch through all stages, then the exchange along `data`."""

    def __init__(
        self, plan: StagePlan, stages: dict[int, nn.Module], wires: Wires, replica: HookedReplica, loss: Loss
    ) -> None:
        self.plan = plan
        """Its stages, and what each rank does when."""
        self._work = {index: StageWork(stage, index == 0) for index, stage in stages.items()}
        self._wires, self._replica, self._loss = wires, replica, loss
        self._rank, self._size = wires.transport.rank, wires.transport.size
        self._here: dict[tuple[str, int, int], Tensors] = {}
        self._arriving: dict[Action, Arriving] = {}
        self._spans: list[Span] = []

    def __call__(self, inputs: Any, targets: Any) -> Tensor:
        """The mean loss of the batch, on every rank; the parameters have their gradients. Collective."""
        batches = microbatches(inputs, self.plan.num_microbatches), microbatches(targets, self.plan.num_microbatches)
        losses: list[Tensor] = []
        self._spans = []
        actions = self.plan.orders[self._rank]
        with self._replica.no_sync(), torch.enable_grad():
            for number, action in enumerate(actions):
                for each in actions[number : number + 2]:  # The next one's input comes while this one is done.
                    self._ask_for(each)
                self._perform(action, batches, losses)
        loss = self._wires.from_last(torch.stack(losses).sum().double() if losses else None, self._tag(0, 0, 2))
        self._wires.flush()
        self._replica.contribution.forward((inputs,), {})
        self._replica.exchange_gathered()
        return loss

    def timeline(self) -> Timeline:
        """What all ranks did in the last step. Collective."""
        mine = [[it.kind, it.stage, it.microbatch, it.start_s, it.stop_s] for it in self._spans]
        everyone = gather_json(mine, self._wires.beneath) if self._size > 1 else [mine]
        spans = [Span(rank, *each) for rank, several in enumerate(everyone) for each in several]
        return Timeline(self._size, self.plan.num_microbatches, tuple(spans))

    def _perform(self, action: Action, batches: tuple[list[Any], list[Any]], losses: list[Tensor]) -> None:
        work, number = self._work[action.stage], action.microbatch
        taken = self._taken(action, batches[0])
        transport = self._wires.transport
        start_s = transport.now()
        if action.kind == "F":
            made = work.forward(number, taken)
            if self._is_last(action.stage):
                loss = self._loss(made[0] if len(made) == 1 else made, batches[1][number]) / self.plan.num_microbatches
                work.keep(number, loss)
                losses.append(loss.detach())
        elif action.kind == "W":
            work.backward_weights(number)
        else:
            backward = work.backward if action.kind == "B" else work.backward_inputs
            made = backward(number, None if self._is_last(action.stage) else taken)
        self._spans.append(Span(self._rank, action.kind, action.stage, number, start_s, transport.now()))
        if action.kind != "W":
            self._give(action, made)

    def _ask_for(self, action: Action) -> None:
        """Have what an action needs from another rank on its way."""
        source = self._source(action)
        if source is None or action in self._arriving or source % self._size == self._rank:
            return
        shapes = self.plan.gives[min(source, action.stage)]
        tag = self._tag(source, action.microbatch, int(action.kind != "F"))
        self._arriving[action] = self._wires.receive(shapes, source % self._size, tag)

    def _taken(self, action: Action, inputs: list[Any]) -> Tensors:
        source = self._source(action)
        if source is None:
            first = action.kind == "F"
            given = inputs[action.microbatch] if first else ()
            return given if isinstance(given, tuple) else (given,)
        if action in self._arriving:
            return self._arriving.pop(action).wait()
        return self._here.pop((_way(action), source, action.microbatch))

    def _give(self, action: Action, made: Tensors) -> None:
        target = action.stage + (1 if action.kind == "F" else -1)
        if not 0 <= target < self.plan.num_stages:
            return
        if target % self._size == self._rank:
            self._here[_way(action), action.stage, action.microbatch] = tuple(it.detach() for it in made)
        else:
            tag = self._tag(action.stage, action.microbatch, int(action.kind != "F"))
            self._wires.send(made, target % self._size, tag)

    def _source(self, action: Action) -> int | None:
        """The stage whose result an action takes; None if it takes none."""
        source = action.stage + (-1 if action.kind == "F" else 1)
        return source if action.kind != "W" and 0 <= source < self.plan.num_stages else None

    def _is_last(self, stage: int) -> bool:
        return stage == self.plan.num_stages - 1

    def _tag(self, stage: int, microbatch: int, way: int) -> int:
        most = max(len(shapes) for shapes in self.plan.gives)
        return ((way * self.plan.num_stages + stage) * self.plan.num_microbatches + microbatch) * most


def _way(action: Action) -> str:
    return "forward" if action.kind == "F" else "back"
