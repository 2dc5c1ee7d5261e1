"""A training step through the pipeline: what replaces the forward and backward lines of a script."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tutti.collectives import clocks_ahead, gather_json
from tutti.errors import ConfigError
from tutti.parallel.pipeline.microbatches import microbatches
from tutti.parallel.pipeline.order import Action, Parcel
from tutti.parallel.pipeline.plan import StagePlan
from tutti.parallel.pipeline.timeline import Span, Timeline
from tutti.parallel.pipeline.wires import Arriving, Wires
from tutti.parallel.pipeline.work import StageWork, Tensors
from tutti.replica import HookedReplica

Loss = Callable[[Any, Any], Tensor]

Same = Callable[[Any], None]
"""Sees to it that ranks that have one replica together were given the same batch."""


class PipelineStep:
    """`loss = pipeline(x, y)`: forward and backward of one batch through all stages, then the exchange along `data`."""

    def __init__(
        self,
        plan: StagePlan,
        stages: dict[int, nn.Module],
        wires: Wires,
        replica: HookedReplica,
        loss: Loss,
        same: Same,
    ) -> None:
        self.plan = plan
        """Its stages, and what each rank does when."""
        self._work = {index: StageWork(stage, index == 0) for index, stage in stages.items()}
        self._wires, self._replica, self._loss, self._same = wires, replica, loss, same
        self._rank = wires.transport.rank
        self._here: dict[Parcel, Tensors] = {}
        self._arriving: dict[Parcel, Arriving] = {}
        self._spans: list[Span] = []

    def __call__(self, inputs: Any, targets: Any) -> Tensor:
        """The mean loss of the batch, on every rank; the parameters have their gradients. Collective."""
        number = self.plan.num_microbatches
        try:
            batches = microbatches(inputs, number), microbatches(targets, number)
        except ConfigError as error:
            raise ConfigError(f"rank {self._wires.transport.world_rank}: {error}") from error
        self._same((inputs, targets))
        losses: list[Tensor] = []
        self._spans = []
        actions = self.plan.orders[self._rank]
        self._wires.begin()
        with self._replica.no_sync(), torch.enable_grad():
            for place, action in enumerate(actions):
                for each in actions[place : place + 2]:  # The next one's input comes while this one is done.
                    self._ask_for(each)
                self._perform(action, batches, losses)
        loss = self._wires.end(torch.stack(losses).sum().double() if losses else None)
        self._replica.contribution.forward((inputs,), {})
        self._replica.exchange_gathered()
        return loss

    def timeline(self) -> Timeline:
        """What all ranks did in the last step, by the first one's clock. Collective."""
        mine = [[it.kind, it.stage, it.microbatch, it.start_s, it.stop_s] for it in self._spans]
        ahead = clocks_ahead(self._wires.beneath)
        everyone = gather_json(mine, self._wires.beneath) if self.plan.num_ranks > 1 else [mine]
        spans = [
            Span(rank, kind, stage, microbatch, start_s - ahead[rank], stop_s - ahead[rank])
            for rank, several in enumerate(everyone)
            for kind, stage, microbatch, start_s, stop_s in several
        ]
        return Timeline(self.plan.num_ranks, self.plan.num_microbatches, tuple(spans))

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
        if (parcel := action.gives(self.plan.num_stages)) is not None:
            self._give(parcel, made)

    def _ask_for(self, action: Action) -> None:
        """Have what an action needs from another rank on its way."""
        parcel = action.takes(self.plan.num_stages)
        if parcel is not None and parcel not in self._arriving and self.plan.sender(parcel) != self._rank:
            self._arriving[parcel] = self._wires.receive(parcel)

    def _taken(self, action: Action, inputs: list[Any]) -> Tensors:
        parcel = action.takes(self.plan.num_stages)
        if parcel is not None:
            return self._arriving.pop(parcel)() if parcel in self._arriving else self._here.pop(parcel)
        given = inputs[action.microbatch] if action.kind == "F" else ()
        return given if isinstance(given, tuple) else (given,)

    def _give(self, parcel: Parcel, made: Tensors) -> None:
        if self.plan.receiver(parcel) == self._rank:
            self._here[parcel] = tuple(it.detach() for it in made)
        else:
            self._wires.send(parcel, made)

    def _is_last(self, stage: int) -> bool:
        return stage == self.plan.num_stages - 1
