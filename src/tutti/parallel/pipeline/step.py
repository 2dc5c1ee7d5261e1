"""`PipelineStep`: one training step through all stages of a pipeline, in place of a script's forward and backward.

How it works
------------
All ranks that hold one replica call the step with the same batch. It is cut into microbatches, and each rank performs
the actions that the schedule gives it (`schedules`), in order. An action takes its input from the batch, from a stage
on this rank (`_local_messages`), or from another rank (`_pending`, received through `stage_links`). The input of the
next action is requested before the present one is computed, so that it arrives meanwhile.

Gradients accumulate in the parameters over all microbatches, inside `no_sync`. The loss of each microbatch is divided
by their number, so the sum is the gradient of the batch's mean loss. After the last action, `end_step` distributes the
loss, and the strategy exchanges the gradients along `data` once, as it would after one backward pass.

An action waits only for a message of another rank. The schedule has no cyclic waits (`simulate_schedule` would fail on
one), so each wait is ended by the sender's `send`, or by an error if that rank is lost. Any exception on this
rank, also one of the user's model or loss, aborts the links, so that no peer waits for the rest of the step.
"""

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
"""Computes the mean loss of a microbatch from the model's output and the targets."""

BatchCheck = Callable[[Any], None]
"""Raises an error if the ranks that hold one replica were given different batches."""


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
        """Run the `stages` of this rank, given by their numbers, in the order of `plan`."""
        self.plan = plan
        """The stages, and the actions of each rank."""
        self._runners = {index: StageRunner(stage, index == 0) for index, stage in stages.items()}
        self._links, self._replica, self._loss, self._check_batch = links, replica, loss, check_batch
        self._rank = links.transport.rank
        self._local_messages: dict[StageMessage, Tensors] = {}
        self._pending: dict[StageMessage, PendingTensors] = {}
        self._spans: list[ActionSpan] = []

    def __call__(self, inputs: Any, targets: Any) -> Tensor:
        """Return the mean loss of the batch on every rank; gradients are in the parameters. Collective."""
        self._links.check_usable()
        try:
            return self._step(inputs, targets)
        except BaseException:
            self._links.abort()  # Peers may be waiting for messages that will not come.
            raise

    def timeline(self) -> PipelineTimeline:
        """Return what all ranks did in the last step, by the clock of the first. Collective."""
        local = [[span.kind, span.stage, span.microbatch, span.start_s, span.stop_s] for span in self._spans]
        # Each host has a clock of its own, whose zero is arbitrary: spans of different ranks are comparable only after
        # this.
        offsets = clock_offsets(self._links.control_transport)
        by_rank = all_gather_json(local, self._links.control_transport)
        spans = [
            ActionSpan(rank, kind, stage, microbatch, start_s - offsets[rank], stop_s - offsets[rank])
            for rank, rank_spans in enumerate(by_rank)
            for kind, stage, microbatch, start_s, stop_s in rank_spans
        ]
        return PipelineTimeline(self.plan.num_ranks, self.plan.num_microbatches, tuple(spans))

    def _step(self, inputs: Any, targets: Any) -> Tensor:
        """Run all actions of this rank, share the loss, and exchange the gradients."""
        self._check_batch((inputs, targets))  # Collective, in the first step: before any rank computes.
        batches = self._split(inputs, self.plan.num_samples), self._split(targets)
        losses: list[Tensor] = []
        self._spans = []
        actions = self.plan.actions_by_rank[self._rank]
        self._links.begin_step()
        # Backward passes of single microbatches must not start an exchange along `data`.
        with self._replica.no_sync(), torch.enable_grad():
            for index, action in enumerate(actions):
                # The input of the next action is received while this one computes.
                # Two and not more: every requested input needs memory, and one message in advance hides the network as
                # long as it is not slower than a pass.
                for upcoming in actions[index : index + 2]:
                    self._request_input(upcoming)
                self._perform(action, batches, losses)
        # A sum, not a mean: each loss was divided by the number of microbatches already.
        loss = self._links.end_step(torch.stack(losses).sum().double() if losses else None)
        # The model's own forward was not called, so the samples of the batch are counted here.
        self._replica.contribution.forward((inputs,), {})
        # Once for the whole batch, with the gradients that all microbatches have left in the parameters.
        self._replica.exchange_gathered()
        return loss

    def _split(self, batch: Any, num_samples: int | None = None) -> list[Any]:
        """Return the microbatches of a batch; refuse one that does not have `num_samples`, if given."""
        try:
            if num_samples is not None and num_rows(batch) != num_samples:
                raise ConfigError(
                    f"a batch of {num_rows(batch)} samples, and this pipeline takes {num_samples}, as many as the "
                    "example given to distribute. Use drop_last=True, or an example as large as your batches."
                )
            return split_batch(batch, self.plan.num_microbatches)
        except ConfigError as error:
            raise ConfigError(f"rank {self._links.transport.world_rank}: {error}") from error

    def _perform(self, action: Action, batches: tuple[list[Any], list[Any]], losses: list[Tensor]) -> None:
        """Compute one action, and send its output on."""
        runner, microbatch = self._runners[action.stage], action.microbatch
        values = self._input(action, batches[0])
        transport = self._links.transport
        start_s = transport.now()  # After the input has arrived: waiting is not part of the span.
        if action.kind == "F":
            output = runner.forward(microbatch, values)
            if self._is_last(action.stage):
                loss = self._mean_loss(_copy_views(output, values), batches[1][microbatch])
                runner.set_loss(microbatch, loss)
                losses.append(loss.detach())
        elif action.kind == "W":
            runner.backward_weights(microbatch)
        else:
            # Both return the gradient of the stage's input, which the stage before waits for. "W", above, has no
            # output.
            backward = runner.backward if action.kind == "B" else runner.backward_inputs
            output = backward(microbatch, None if self._is_last(action.stage) else values)
        self._spans.append(ActionSpan(self._rank, action.kind, action.stage, microbatch, start_s, transport.now()))
        if (message := action.output_message(self.plan.num_stages)) is not None:
            self._send(message, output)

    def _mean_loss(self, output: Tensors, target: Any) -> Tensor:
        """Return a microbatch's share of the mean loss over the batch."""
        loss = self._loss(output[0] if len(output) == 1 else output, target)
        if not isinstance(loss, Tensor) or loss.dim():
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ConfigError(
                f"rank {self._links.transport.world_rank}: the loss must be one number, the mean over samples, got "
                f"{got}. Take the mean in the function that job.pipeline is given."
            )
        return loss / self.plan.num_microbatches

    def _request_input(self, action: Action) -> None:
        """Start receiving what an action needs from another rank, unless it is already under way."""
        message = action.input_message(self.plan.num_stages)
        # An action is seen twice: as the next one, and as the present one.
        if message is not None and message not in self._pending and self.plan.sender(message) != self._rank:
            self._pending[message] = self._links.receive(message)

    def _input(self, action: Action, inputs: list[Any]) -> Tensors:
        """Wait for the input of an action: of another stage, or for the first stage from the batch."""
        message = action.input_message(self.plan.num_stages)
        if message is not None:
            return self._pending.pop(message)() if message in self._pending else self._local_messages.pop(message)
        values = inputs[action.microbatch] if action.kind == "F" else ()
        return values if isinstance(values, tuple) else (values,)

    def _send(self, message: StageMessage, tensors: Tensors) -> None:
        """Hand the output of an action to the stage that needs it, here or on another rank."""
        # Neighbouring stages are on one rank only if `pipe` has just one.
        # Detached, as a received tensor is: the backward pass of one stage must not run on into the other's graph.
        if self.plan.receiver(message) == self._rank:
            self._local_messages[message] = tuple(tensor.detach() for tensor in tensors)
        else:
            self._links.send(message, tensors)

    def _is_last(self, stage: int) -> bool:
        """Whether a stage computes the loss."""
        return stage == self.plan.num_stages - 1


def _copy_views(output: Tensors, values: Tensors) -> Tensors:
    """Return a stage's output, with copies of tensors that are views of its input.

    The user's loss function may keep what it is given, and the memory of the input is overwritten two steps later.
    """
    storages = {value.untyped_storage().data_ptr() for value in values if isinstance(value, Tensor)}
    return tuple(tensor.clone() if tensor.untyped_storage().data_ptr() in storages else tensor for tensor in output)
