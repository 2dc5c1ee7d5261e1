"""A training step through the pipeline: what replaces the forward and backward lines of a script."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tutti.collectives import all_gather_json, clock_offsets
from tutti.errors import ConfigError
from tutti.parallel.pipeline.microbatches import split_batch
from tutti.parallel.pipeline.plan import PipelinePlan
from tutti.parallel.pipeline.schedules import Action, StageMessage
from tutti.parallel.pipeline.stage_links import PendingTensors, StageLinks
from tutti.parallel.pipeline.stage_runner import StageRunner, Tensors
from tutti.parallel.pipeline.timeline import ActionSpan, PipelineTimeline
from tutti.replica import HookedReplica
from tutti.replica.samples import num_rows

Loss = Callable[[Any, Any], Tensor]

BatchCheck = Callable[[Any], None]
"""Sees to it that ranks that have one replica together were given the same batch."""


class PipelineStep:
    """`loss = pipeline(x, y)`: forward and backward of one batch through all stages, then the exchange along `data`."""

    def __init__(
        self,
        plan: PipelinePlan,
        stages: dict[int, nn.Module],
        links: StageLinks,
        replica: HookedReplica,
        loss: Loss,
        check_batch: BatchCheck,
    ) -> None:
        self.plan = plan
        """Its stages, and what each rank does when."""
        self._work = {index: StageRunner(stage, index == 0) for index, stage in stages.items()}
        self._links, self._replica, self._loss, self._check_batch = links, replica, loss, check_batch
        self._rank = links.transport.rank
        self._here: dict[StageMessage, Tensors] = {}
        self._arriving: dict[StageMessage, PendingTensors] = {}
        self._spans: list[ActionSpan] = []

    def __call__(self, inputs: Any, targets: Any) -> Tensor:
        """The mean loss of the batch, on every rank; the parameters have their gradients. Collective."""
        self._links.check_usable()
        try:
            return self._stepped(inputs, targets)
        except BaseException:
            self._links.abort()
            raise

    def _stepped(self, inputs: Any, targets: Any) -> Tensor:
        self._check_batch((inputs, targets))
        batches = self._cut(inputs, self.plan.num_samples), self._cut(targets)
        losses: list[Tensor] = []
        self._spans = []
        actions = self.plan.actions_by_rank[self._rank]
        self._links.begin_step()
        with self._replica.no_sync(), torch.enable_grad():
            for place, action in enumerate(actions):
                for each in actions[place : place + 2]:  # The next one's input comes while this one is done.
                    self._ask_for(each)
                self._perform(action, batches, losses)
        loss = self._links.end_step(torch.stack(losses).sum().double() if losses else None)
        self._replica.contribution.forward((inputs,), {})
        self._replica.exchange_gathered()
        return loss

    def _cut(self, batch: Any, wanted: int | None = None) -> list[Any]:
        """Its microbatches; `wanted` is how many samples it must have, if that matters."""
        try:
            if wanted is not None and num_rows(batch) != wanted:
                raise ConfigError(
                    f"a batch of {num_rows(batch)} samples, and this pipeline takes {wanted}, as many as the example "
                    "of distribute had. Use drop_last=True, or an example as large as your batches."
                )
            return split_batch(batch, self.plan.num_microbatches)
        except ConfigError as error:
            raise ConfigError(f"rank {self._links.transport.world_rank}: {error}") from error

    def timeline(self) -> PipelineTimeline:
        """What all ranks did in the last step, by the first one's clock. Collective."""
        mine = [[it.kind, it.stage, it.microbatch, it.start_s, it.stop_s] for it in self._spans]
        ahead = clock_offsets(self._links.control_transport)
        everyone = all_gather_json(mine, self._links.control_transport)
        spans = [
            ActionSpan(rank, kind, stage, microbatch, start_s - ahead[rank], stop_s - ahead[rank])
            for rank, several in enumerate(everyone)
            for kind, stage, microbatch, start_s, stop_s in several
        ]
        return PipelineTimeline(self.plan.num_ranks, self.plan.num_microbatches, tuple(spans))

    def _perform(self, action: Action, batches: tuple[list[Any], list[Any]], losses: list[Tensor]) -> None:
        work, number = self._work[action.stage], action.microbatch
        taken = self._taken(action, batches[0])
        transport = self._links.transport
        start_s = transport.now()
        if action.kind == "F":
            made = work.forward(number, taken)
            if self._is_last(action.stage):
                shown = _apart(made, taken)  # A loss may keep what it was given.
                loss = self._mean_loss(shown, batches[1][number])
                work.set_loss(number, loss)
                losses.append(loss.detach())
        elif action.kind == "W":
            work.backward_weights(number)
        else:
            backward = work.backward if action.kind == "B" else work.backward_inputs
            made = backward(number, None if self._is_last(action.stage) else taken)
        self._spans.append(ActionSpan(self._rank, action.kind, action.stage, number, start_s, transport.now()))
        if (message := action.output_message(self.plan.num_stages)) is not None:
            self._give(message, made)

    def _mean_loss(self, shown: Tensors, target: Any) -> Tensor:
        """A microbatch's part of the mean over the batch."""
        loss = self._loss(shown[0] if len(shown) == 1 else shown, target)
        if not isinstance(loss, Tensor) or loss.dim():
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ConfigError(
                f"rank {self._links.transport.world_rank}: the loss must be one number, the mean over samples, got "
                f"{got}. Take its mean in the function that job.pipeline is given."
            )
        return loss / self.plan.num_microbatches

    def _ask_for(self, action: Action) -> None:
        """Have what an action needs from another rank on its way."""
        message = action.input_message(self.plan.num_stages)
        if message is not None and message not in self._arriving and self.plan.sender(message) != self._rank:
            self._arriving[message] = self._links.receive(message)

    def _taken(self, action: Action, inputs: list[Any]) -> Tensors:
        message = action.input_message(self.plan.num_stages)
        if message is not None:
            return self._arriving.pop(message)() if message in self._arriving else self._here.pop(message)
        given = inputs[action.microbatch] if action.kind == "F" else ()
        return given if isinstance(given, tuple) else (given,)

    def _give(self, message: StageMessage, made: Tensors) -> None:
        if self.plan.receiver(message) == self._rank:
            self._here[message] = tuple(it.detach() for it in made)
        else:
            self._links.send(message, made)

    def _is_last(self, stage: int) -> bool:
        return stage == self.plan.num_stages - 1


def _apart(made: Tensors, taken: Tensors) -> Tensors:
    """What a stage made; what is but another view of what it took, which will be written over, as a copy."""
    places = {it.untyped_storage().data_ptr() for it in taken if isinstance(it, Tensor)}
    return tuple(it.clone() if it.untyped_storage().data_ptr() in places else it for it in made)
