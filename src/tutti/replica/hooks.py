"""`HookedReplica`: a replica that trains. Hooks on its parameters, modules and optimiser report the events of training.

How it works
------------
`listen` registers hooks for as much as the strategy needs to know:

- "steps": before and after each step of the optimiser.
- "samples": also each forward pass and each gradient, to count the samples that this rank contributed.
- "gradients": also each gradient, to fill buckets during backward. See `BackwardPass`.

The listener is the strategy's exchange. `detach` removes all hooks, and gives parameters gradients of their own in
place of views of buckets, whose memory may belong to the transport.

Three flags describe what this rank does for the moment. `syncing` is False inside `no_sync`: gradients gather on this
rank. `away`: this rank takes no part, and may not train. `in_consensus`: the model holds the parameters of the
consensus, and may not be trained.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isnan
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.coordination.activity import Activity
from tutti.errors import ConfigError, RankLost
from tutti.replica.backward import BackwardPass
from tutti.replica.factors import Catcher, FactoredLayer
from tutti.replica.loss_scaling import LossScaling
from tutti.replica.optimizer_step import OptimizerStep
from tutti.replica.owned_hooks import OwnedHook
from tutti.replica.replica import Checks, EventScope, Listener, Replica
from tutti.replica.samples import ADD_UP, Contribution, SampleCounts
from tutti.replica.step_checks import StepChecks


class HookedReplica(Replica):
    """Turns what autograd and the optimiser do into the events of training.

    `bucket_ready` comes in the order of the buckets' indices on every rank, whatever order the gradients came in, so
    that all ranks start the same exchanges in the same order.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, sample_counts: SampleCounts) -> None:
        super().__init__(model, optimizer)
        self.has_exchanged = False
        """Whether a backward pass was exchanged since the last step of the optimiser."""
        self.activity = Activity()
        """Where the phases of training are reported: replaced by that of the process, where others may wait for it."""
        self.contribution = Contribution(sample_counts)
        self.sample_counts = sample_counts
        self.syncing = True
        """Whether backward passes are exchanged; False inside `no_sync`."""
        self.away = False
        """Whether this rank takes no part for the moment."""
        self.on_caught: Callable[[str], None] | None = None
        """Called with a parameter's name when its factors are caught; autograd calls no hook of that parameter then."""
        self.checks: Checks | None = None
        """Checks of what the user does, called in every step; None on a single rank."""
        self.on_forward: Callable[[Any, Any], None] | None = None
        """Called with the inputs of each forward pass that trains, but not in compiled graphs."""
        self.reports_passes = False
        """Whether backward passes are reported, and not only steps."""
        self._listener: Listener | None = None
        self._handles: list[Any] = []
        self._accumulators: list[Any] = []
        """Autograd's nodes that have hooks of this replica: a parameter holds its own weakly."""
        self._backward = BackwardPass(self)
        self._optimizer_step = OptimizerStep(self)
        self._catcher: Catcher | None = None
        self.step_checks: StepChecks | None = None
        """Checks that all that a step changes is exchanged; None where gradients are not looked at."""

    @property
    def listener(self) -> Listener:
        """The exchange that receives the events of training."""
        assert self._listener is not None
        return self._listener

    def listen(self, listener: Listener, to: EventScope) -> None:
        self._listener, self.reports_passes = listener, to == "gradients"
        self._handles.append(self.optimizer.register_step_pre_hook(self._optimizer_step.begin))
        self._handles.append(self.optimizer.register_step_post_hook(self._optimizer_step.end))
        if to == "steps":
            return
        self._listen_to_model(to)
        # After the hooks above are there: only later ones are the user's.
        self.step_checks = StepChecks(self.model, self.optimizer, self.slots, self.sample_counts.distributed)

    def _listen_to_model(self, to: EventScope) -> None:
        self._handles.append(self.model.register_forward_pre_hook(_ForwardHook(self), with_kwargs=True))
        # Steps that a `GradScaler` skips show in these models' gradients.
        if to == "gradients":
            self.sample_counts.models.add(self.model)
        else:
            self.loss_scaling = LossScaling(self.optimizer)  # The rank steps with its own gradients.
        for slot in self.slots:
            hook = self._backward.gradient_hook(slot) if to == "gradients" else self._counting_hook()
            self._handles.append(slot.tensor.register_post_accumulate_grad_hook(hook))

    def sum_gradients(self, num_ranks: int, adds_up: bool) -> None:
        """Add up gradients over ranks, for a loss that is a sum over samples.

        Where the exchange `adds_up` itself, its weight says so. Otherwise each rank sends a multiple, whose mean is the
        sum.
        """
        replica_ref = ref(self)

        def scale(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            replica = replica_ref()
            return None if replica is None else tuple(map(replica.contribution.as_part_of_sum, gradients))

        for slot in self.slots:
            # Before autograd accumulates them: what `p.grad` holds from earlier passes is exchanged already. And not
            # a hook of the tensor: `torch.autograd.grad` calls these too, and the user would get a multiple.
            accumulator: Any = torch.autograd.graph.get_gradient_edge(slot.tensor).node
            self._handles.append(accumulator.register_prehook(scale))
            self._accumulators.append(accumulator)
        self.contribution.num_summed = 1 if adds_up else num_ranks
        self.contribution.sum_weight = ADD_UP if adds_up else 1.0

    def take_samples(self) -> float:
        weight = self.contribution.take()
        return 0.0 if self.step_is_void and not isnan(weight) else weight

    def note_loss(self, error: RankLost) -> None:
        """Note the loss of a rank where training survives it; raise it elsewhere, or the mistake that explains it."""
        if not self.survives:
            raise explained(error, self) from None
        self.lost = self.lost or error

    def renew(self) -> None:
        """Get ready to be attached to another exchange, after `detach`."""
        self._backward = BackwardPass(self)
        self.lost, self.has_exchanged = None, False
        for slot in self.slots:
            slot.touched = slot.arrived = slot.fresh = False

    def detach(self) -> None:
        """Remove all hooks, and give parameters gradients of their own. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._accumulators.clear()
        if self._catcher is not None:
            self._catcher.detach()
        if self.loss_scaling is not None:
            self.loss_scaling.detach()
        self.loss_scaling = self.marks = None
        self._catcher, self.exchanged_as_factors, self.left_out = None, frozenset(), frozenset()
        self.sample_counts.models.discard(self.model)
        for slot in self.slots:
            # The bucket may lie in shared memory, which is unmapped when the transport closes.
            if slot.tensor.grad is slot.view:
                slot.tensor.grad = slot.view.clone()
        for slot in [*self.slots, *self.statistics]:
            # Back to the state before `allocate`: a later `distribute` starts from it.
            slot.view = slot.tensor
        self.buckets.clear()
        self._memories.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients to this rank; the next backward pass outside exchanges what has gathered."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    @torch.no_grad()
    def exchange_gathered(self) -> None:
        """Exchange what backward passes within `no_sync` have left, as one more backward pass here would."""
        if not self.reports_passes or not self.syncing:
            return
        for slot in self.slots:
            # One that autograd did not accumulate, but the user made, was not scaled yet.
            if slot.tensor.grad is not None and not slot.touched and self.contribution.num_summed:
                slot.tensor.grad = self.contribution.as_part_of_sum(slot.tensor.grad)
            # No hook will be called, so the flags of buckets are derived from the gradients that are there.
            slot.touched = slot.tensor.grad is not None
        self._backward.start(in_backward=False)
        self._backward.finish()

    def watch_factors(self) -> list[FactoredLayer]:
        self._catcher = Catcher(self.model, self.slots, self._backward.factors_caught)
        return self._catcher.layers

    def keep_factors(self) -> None:
        self._catcher = Catcher(self.model, self.slots, self._backward.factors_caught)
        self._catcher.keep(frozenset(layer.slot.name for layer in self._catcher.layers), keeps_gradient=True)

    def exchange_as_factors(self, names: frozenset[str]) -> None:
        assert self._catcher is not None
        super().exchange_as_factors(names)
        self._catcher.keep(names)

    @property
    def factored(self) -> list[FactoredLayer]:
        return [] if self._catcher is None else self._catcher.layers

    @property
    def arranged(self) -> bool:  # type: ignore[override]
        return self._backward.arrivals is None

    def arrange(self, names: Sequence[str]) -> None:
        # Cutting zeroes the memory and moves slots, so gradients that are views of buckets are copied out and back.
        grads = [(slot, slot.view.clone()) for slot in self.slots if slot.tensor.grad is slot.view]
        super().arrange(names)
        self._backward.arrivals = None
        for slot, grad in grads:
            slot.view.copy_(grad)
            slot.tensor.grad = slot.view

    def _counting_hook(self) -> Callable[[Tensor], None]:
        """Return the hook of a parameter's gradient, for a replica that counts samples only."""
        replica_ref = ref(self)

        def on_gradient(_: Tensor) -> None:
            if (replica := replica_ref()) is not None:
                replica.contribution.backward()

        return on_gradient

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        training = torch.is_grad_enabled()
        if not torch.compiler.is_compiling():
            self.activity.enter("forward" if training else "evaluation")
        if not training:  # An evaluation: its samples are not trained on.
            return
        # Id -1: not inside a backward pass, in which checkpointed layers go forward again.
        if self._backward.running and torch._C._current_graph_task_id() == -1:
            raise ConfigError(
                "the last backward pass failed half-way on this rank, so its exchanges no longer match those of the "
                "others. An exception in backward cannot be skipped in a distributed run: mend its cause and restart."
            )
        if not torch.compiler.is_compiling() and self.on_forward is not None:
            self.on_forward(args, kwargs)
        self.contribution.forward(args, kwargs)


def explained(error: RankLost, replica: HookedReplica) -> Exception:
    """Return the mistake for which a peer has ended, if the checks of this rank know it; else the error itself."""
    return error if replica.checks is None else replica.checks.cause_of(error)


class _ForwardHook(OwnedHook):
    """Reports the forward passes of a model to its replica."""

    def __init__(self, replica: HookedReplica) -> None:
        self._replica = ref(replica)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (replica := self._replica()) is not None:
            replica._forward(args, kwargs)
