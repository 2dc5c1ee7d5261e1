"""A replica that trains: its buckets fill during backward."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from tutti.collectives import broadcast_json
from tutti.errors import ConfigError
from tutti.replica.buckets import Slot
from tutti.replica.factors import Catcher, FactoredLayer, Pair
from tutti.replica.owned_hooks import OwnedHook
from tutti.replica.replica import Heard, Listener, Replica
from tutti.replica.samples import Contribution, SampleCounts


class HookedReplica(Replica):
    """Turns what autograd and the optimiser do into the events of training.

    `bucket_ready` comes in the order of the buckets' indices on every rank, whatever order the
    gradients came in, so that all ranks start the same exchanges in the same order.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, sample_counts: SampleCounts) -> None:
        super().__init__(model, optimizer)
        self.contribution = Contribution(sample_counts)
        self._sample_counts = sample_counts
        self.syncing = True
        self.away = False
        """Whether this rank takes no part for the moment."""
        self.agreeing = False
        """Whether the model holds what all agree on, and not what this rank trains."""
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        self._listener: Listener | None = None
        self._heard: Heard = "steps"
        self._handles: list[Any] = []
        self._order: list[Slot] | None = []
        self._lock = Lock()  # Autograd runs one thread per device.
        self._armed = False
        self._weight = 1.0
        self._next = 0
        self._kept: list[tuple[Slot, Tensor]] = []
        self._catcher: Catcher | None = None
        self.on_caught: Callable[[str], None] | None = None
        """Called with a parameter's name when factors of its gradient are there, whose hooks are then not called."""

    def listen(self, listener: Listener, to: Heard) -> None:
        self._listener, self._heard = listener, to
        self._handles.append(self.optimizer.register_step_pre_hook(self._before_step))
        self._handles.append(self.optimizer.register_step_post_hook(self._after_step))
        if to == "steps":
            return
        self._handles.append(self.model.register_forward_pre_hook(_ForwardHook(self), with_kwargs=True))
        if to == "gradients":
            self._sample_counts.models.add(self.model)
        for slot in self.slots:
            hook = self._gradient_hook(slot) if to == "gradients" else self._counting_hook()
            self._handles.append(slot.tensor.register_post_accumulate_grad_hook(hook))

    def take_samples(self) -> float:
        return self.contribution.take()

    def detach(self) -> None:
        """Take all hooks away and give parameters gradients of their own. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._catcher is not None:
            self._catcher.detach()
        self._catcher, self.apart, self.left_out = None, frozenset(), frozenset()
        self._sample_counts.models.discard(self.model)
        for slot in self.slots:
            if slot.tensor.grad is slot.view:
                slot.tensor.grad = slot.view.clone()
        for slot in [*self.slots, *self.statistics]:
            slot.view = slot.tensor
        self.buckets.clear()
        self._memories.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients to this rank; the next backward outside exchanges what has gathered."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    @torch.no_grad()
    def exchange_gathered(self) -> None:
        """Exchange what backward passes within `no_sync` have left, as one more here would."""
        if self._heard != "gradients" or not self.syncing:
            return
        for slot in self.slots:
            slot.touched = slot.tensor.grad is not None
        self._arm(in_backward=False)
        self._backward_done()

    def _gradient_hook(self, slot: Slot) -> Callable[[Tensor], None]:
        # A parameter keeps its hooks where Python's collector does not look: they must not keep the parameter.
        slot_of, replica_of = ref(slot), ref(self)

        def arrived(_: Tensor) -> None:
            slot, replica = slot_of(), replica_of()
            if slot is None or replica is None:
                return
            if slot.name in replica.left_out:
                if replica.syncing:
                    replica._advance()
                return
            slot.touched = True
            if not replica.syncing:
                replica.contribution.backward()
                return
            if slot.arrived:
                return
            slot.arrived = True
            if slot.name in replica.apart:  # Another use of a weight whose factors are caught.
                replica._advance()
                return
            bucket = slot.bucket
            bucket.missing -= 1
            if replica._order is not None:
                replica._order.append(slot)
            if bucket.missing == 0 or not replica._armed:
                replica._advance()

        return arrived

    def _counting_hook(self) -> Callable[[Tensor], None]:
        replica_of = ref(self)

        def arrived(_: Tensor) -> None:
            if (replica := replica_of()) is not None:
                replica.contribution.backward()

        return arrived

    def _advance(self) -> None:
        if torch.is_grad_enabled():  # backward(create_graph=True): what is done here is no part of that graph.
            with torch.no_grad():
                return self._advance()
        with self._lock:
            if not self._armed:
                self._arm()
            self._hand_over(complete_only=True)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        if self._armed and torch._C._current_graph_task_id() == -1:
            raise ConfigError(
                "the last backward pass failed half-way on this rank, so it is out of step with the others. "
                "An exception in backward cannot be skipped in a distributed run: mend its cause and restart."
            )
        self.contribution.forward(args, kwargs)

    def _arm(self, in_backward: bool = True) -> None:
        if self.away:
            raise ConfigError("a backward pass inside job.away(), in which this rank takes no part: train outside it.")
        self._armed = True
        self._check_still_frozen()
        if in_backward:
            Variable._execution_engine.queue_callback(self._backward_done)
        assert self._listener is not None
        self._weight = self.contribution.take()
        self._listener.backward_started(self._weight)

    def _hand_over(self, complete_only: bool) -> None:
        """Give the listener the next buckets, in order, as far as they are complete."""
        assert self._listener is not None
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if complete_only and (bucket.missing or not bucket.of_parameters):
                return
            for layer in self.factored:
                if layer.beside and layer.slot.bucket is bucket:
                    layer.hand_over()
            self._kept += bucket.fill()
            self._next += 1
            self._listener.bucket_ready(bucket)

    def _backward_done(self) -> None:
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._backward_done()
        assert self._listener is not None
        apart = self.apart
        for layer in self.factored:
            if layer.catching and not layer.beside and not layer.handed_over:
                self._listener.factors_ready(layer)
        self._hand_over(complete_only=False)
        self._listener.backward_done()
        self._settle()
        if self._order and len(self.buckets) > 1:
            self._cut_again(self._order)
        elif self.apart != apart:
            self.arrange([slot.name for slot in self.slots])
        self._order = None

    # Factors

    def watch_factors(self) -> list[FactoredLayer]:
        self._catcher = Catcher(self.model, self.slots, self._caught)
        return self._catcher.layers

    def keep_factors(self) -> None:
        self._catcher = Catcher(self.model, self.slots, self._caught)
        self._catcher.keep(frozenset(layer.slot.name for layer in self._catcher.layers), beside=True)

    def set_apart(self, names: frozenset[str]) -> None:
        assert self._catcher is not None
        super().set_apart(names)
        self._catcher.keep(names)

    @property
    def factored(self) -> list[FactoredLayer]:
        return [] if self._catcher is None else self._catcher.layers

    @torch.no_grad()
    def _caught(self, layer: FactoredLayer, pair: Pair) -> None:
        if layer.beside:
            self._caught_beside(layer, pair)
            return
        if self.compute_clock is not None:
            self.compute_clock.gradient(layer.slot.name)
        if self.on_caught is not None:
            self.on_caught(layer.slot.name)
        with self._lock:
            if not self.syncing:
                self.contribution.backward()
            elif not self._armed:
                self._arm()
            layer.catch(pair, stays=not self.syncing)
            if self.syncing and layer.complete:
                assert self._listener is not None
                self._listener.factors_ready(layer)

    def _settle(self) -> None:
        """Make the buckets' content the gradients and statistics of the model."""
        for slot, value in self._kept:
            if not self._mark_of(slot):
                slot.view.copy_(value)
        for bucket in self.buckets:
            for slot in bucket.slots:
                if not bucket.of_parameters:
                    slot.tensor.copy_(slot.view)
                elif not (slot.touched and self._weight):
                    self._settle_absent(slot)
            bucket.expect()
        for layer in self.factored:
            layer.slot.arrived = False
            layer.expect()
        if self.left_out:
            for slot in self.slots:
                if slot.name in self.left_out:
                    slot.tensor.grad = None
        self._kept.clear()
        self._next = 0
        self._armed = False

    def _settle_absent(self, slot: Slot) -> None:
        """A parameter to which this rank contributed nothing: has it a gradient, from anyone?"""
        if self._mark_of(slot):
            slot.tensor.grad = slot.view
        elif slot.touched and slot.fresh:  # By samples that do not count, and by nothing before them.
            slot.tensor.grad = None

    def _mark_of(self, slot: Slot) -> bool:
        if slot.tensor.is_meta:
            return slot.touched  # Without values, what holds here holds everywhere.
        return bool(slot.bucket.marks[slot.bucket.slots.index(slot)] != 0)

    def _cut_again(self, order: list[Slot]) -> None:
        """Re-cut the buckets in the order in which rank 0 saw gradients arrive."""
        numbers = {slot: number for number, slot in enumerate(self.slots)}
        seen = broadcast_json([numbers[slot] for slot in order], self._transport)
        unseen = sorted(set(numbers.values()) - set(seen))
        self.arrange([self.slots[number].name for number in [*seen, *unseen]])

    def _caught_beside(self, layer: FactoredLayer, pair: Pair) -> None:
        """Make the gradient as well, and have it arrive as autograd would have."""
        if self.syncing and layer.handed_over:
            raise ConfigError(
                f"the gradient of '{layer.slot.name}' was sent, and backward came to another use of the layer, in a "
                "graph older than the last forward pass. Go back through graphs in the order in which they were made, "
                "or do without factors."
            )
        layer.catch(pair, stays=True)
        layer.slot.touched = True
        if self.syncing:
            self._advance()
        else:
            self.contribution.backward()
        # It arrives with autograd, which calls hooks of the weight when it has been through all of its uses.

    @property
    def arranged(self) -> bool:  # type: ignore[override]
        return self._order is None

    def arrange(self, names: Sequence[str]) -> None:
        grads = [(slot, slot.view.clone()) for slot in self.slots if slot.tensor.grad is slot.view]
        super().arrange(names)
        self._order = None
        for slot, grad in grads:
            slot.view.copy_(grad)
            slot.tensor.grad = slot.view

    def _check_still_frozen(self) -> None:
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ConfigError(
                    f"parameter '{name}' was frozen when the model was distributed and is trained now, so no other "
                    "rank gets its gradient. Call job.finish() and tutti.distribute(...) again after unfreezing."
                )

    def _before_step(self, *_: Any) -> None:
        if self.agreeing or self.away:
            where = "job.consensus(), whose model is not this rank's own" if self.agreeing else "job.away()"
            raise ConfigError(f"a step of the optimiser inside {where}: train outside it.")
        assert self._listener is not None
        self._listener.before_step()

    def _after_step(self, *_: Any) -> None:
        assert self._listener is not None
        self.steps += 1
        self._listener.after_step()


class _ForwardHook(OwnedHook):
    """Tells a replica of its model's forward passes."""

    def __init__(self, replica: HookedReplica) -> None:
        self._replica = ref(replica)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (replica := self._replica()) is not None:
            replica._forward(args, kwargs)
