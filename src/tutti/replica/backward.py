"""One backward pass of a replica: gradients arrive from autograd, and complete buckets are handed to the exchange.

How it works
------------
Autograd calls the hook of a parameter when its gradient is accumulated: on the CPU in the thread that called backward,
on GPUs in threads of autograd's own, one per device. The states of a pass:

1. *Idle.* The first gradient (or pair of factors) starts the pass: `start` queues `finish` as a callback of autograd's
   engine, takes the weight of this rank's samples, and calls the listener's `backward_started`.
2. *Running.* Each gradient decrements its bucket's `missing`. `advance` hands over buckets that are complete, under
   `_lock`, always in the order of their indices. A bucket that is complete early waits for those before it. So all
   ranks start the same exchanges in the same order, whatever order their gradients came in. That is the
   invariant which keeps collectives matched between ranks.
3. *Finishing.* Autograd calls `finish` when the pass is over. It hands over the rest (buckets with parameters that got
   no gradient on this rank, and buffers), waits in the listener's `backward_done`, and `_settle` makes what is in the
   buckets the gradients of the model. Then the pass is idle again.

After the first pass buckets are cut anew, in the order in which rank 0 saw gradients arrive (`_recut`): then buckets
complete as early as they can. All ranks do so together, since the order is broadcast.

A lost rank ends the exchanges of a pass with `RankLost`. Where training survives that (`Replica.survives`), the pass is
void: it is not exchanged any more, and `finish` sets its gradients to zero. So is every pass until ranks are others.

An exception in backward leaves the state *running*; the next forward pass sees that and refuses, because this rank has
started exchanges that the others have completed with something else.

Hooks refer to the pass and to slots weakly: a parameter keeps its hooks in C++, where Python's garbage collector does
not look, so a strong reference would keep the model for ever.
"""

from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor
from torch.autograd import Variable

from tutti.collectives import broadcast_json
from tutti.errors import ConfigError, RankLost
from tutti.replica.buckets import Bucket, Slot
from tutti.replica.factors import FactoredLayer, Pair
from tutti.replica.step_checks import unfrozen

if TYPE_CHECKING:
    from tutti.replica.hooks import HookedReplica


class BackwardPass:
    """The state of a replica's backward pass, from its first gradient to the exchanged ones."""

    def __init__(self, replica: "HookedReplica") -> None:
        self._replica = replica
        self.running = False
        """Whether a pass has begun and is not over."""
        self.arrivals: list[Slot] | None = []
        """Slots in the order in which gradients arrived in the first pass; None once buckets have their final order."""
        self._frozen = [(name, p) for name, p in replica.model.named_parameters() if not p.requires_grad]
        self._lock = Lock()  # Autograd runs one thread per device.
        self._weight = 1.0
        self._next_bucket = 0
        self._kept: list[tuple[Slot, Tensor]] = []
        """Gradients that parameters had before this pass, which did not reach them."""

    def gradient_hook(self, slot: Slot) -> Callable[[Tensor], None]:
        """Return the hook of a parameter's gradient, for a replica that exchanges gradients."""
        slot_ref, pass_ref = ref(slot), ref(self)

        def on_gradient(_: Tensor) -> None:
            slot, backward = slot_ref(), pass_ref()
            if slot is None or backward is None:
                return
            replica = backward._replica
            if slot.name in replica.left_out:
                if replica.syncing:
                    # Nothing to exchange here, but a pass in which all gradients are left out must start as well.
                    backward.advance()
                return
            # A gradient that `no_sync` keeps here counts as well: the next exchange sends the sum.
            slot.touched = True
            if not replica.syncing:
                replica.contribution.backward()
                return
            # A nested backward (reentrant checkpointing) accumulates into a parameter again: it counts once.
            if slot.arrived:
                return
            slot.arrived = True
            if slot.name in replica.exchanged_as_factors:  # Another use of a weight whose factors are caught.
                backward.advance()
                return
            bucket = slot.bucket
            # No lock: the slots of a bucket are on one device, and so in one thread of autograd.
            bucket.missing -= 1
            if backward.arrivals is not None:
                backward.arrivals.append(slot)
            # The first gradient of a pass starts it, even if it completes no bucket.
            if bucket.missing == 0 or not backward.running:
                backward.advance(slot)

        return on_gradient

    def advance(self, slot: Slot | None = None) -> None:
        """Start the pass if it has not begun, and hand over the buckets that are complete.

        `slot` is the parameter whose gradient has arrived, where there is one.
        """
        if torch.is_grad_enabled():  # backward(create_graph=True): what is done here is no part of that graph.
            with torch.no_grad():
                return self.advance(slot)
        with self._lock:
            try:
                if not self.running:
                    self.start(slot=slot)
                if not self._replica.is_void:
                    self._hand_over(complete_only=True)
            except RankLost as error:
                self._replica.note_loss(error)

    def start(self, in_backward: bool = True, slot: Slot | None = None) -> None:
        """Begin a pass.

        Args:
            in_backward: False where gradients of earlier passes are exchanged without a backward.
            slot: the parameter whose gradient came first, where it is known.
        """
        replica = self._replica
        if replica.away:
            raise ConfigError("a backward pass inside job.away(), in which this rank takes no part: train outside it.")
        replica.activity.enter("backward")
        if replica.checks is not None and not replica.is_void:
            replica.checks.pass_started(slot)
        self.running = True
        self._check_still_frozen()
        if in_backward:
            # Autograd calls it after the last node of this backward, before `loss.backward()` returns.
            Variable._execution_engine.queue_callback(self.finish)
        if replica.is_void:
            return
        # Once per pass: what was counted so far is used up by this exchange.
        self._weight = replica.contribution.take()
        replica.listener.backward_started(self._weight)

    def _hand_over(self, complete_only: bool) -> None:
        """Give the listener the next buckets in order: as far as they are complete, or all that are left."""
        replica = self._replica
        while self._next_bucket < len(replica.buckets):
            bucket = replica.buckets[self._next_bucket]
            # Buffers are left for `finish`: no gradient announces that they are ready.
            if complete_only and (bucket.missing or not bucket.of_parameters):
                return
            for layer in replica.factored:
                # From here on the exchange may use the factors in place of this gradient.
                if layer.keeps_gradient and layer.slot.bucket is bucket:
                    layer.hand_over()
            # Copies gradients that autograd made outside the bucket, before the exchange reads it.
            self._kept += bucket.fill()
            if replica.owed:
                self._add_owed(bucket)
            self._next_bucket += 1
            replica.listener.bucket_ready(bucket)

    def _add_owed(self, bucket: Bucket) -> None:
        """Add what a codec of the run before had not sent, once."""
        for number, slot in enumerate(bucket.slots):
            if (owed := self._replica.owed.pop(slot.name, None)) is not None:
                slot.view.add_(owed.to(slot.view))
                bucket.has_grad[number] = 1
                if slot.tensor.grad is None:
                    slot.tensor.grad = slot.view
                # The factors of this pass are not all of the gradient.
                for layer in self._replica.factored:
                    if layer.slot is slot:
                        layer.pairs = []

    def finish(self) -> None:
        """End the pass: hand over what is left, wait for the exchange, and give the model its gradients."""
        if torch.is_grad_enabled():  # As in `advance`.
            with torch.no_grad():
                return self.finish()
        if not self._replica.is_void:
            try:
                self._finish()
            except RankLost as error:
                self._replica.note_loss(error)
        if self._replica.is_void:
            self._make_void()

    def _finish(self) -> None:
        replica = self._replica
        factored_before = replica.exchanged_as_factors
        # Layers that backward did not reach, or reached less often than forward: other ranks wait for their factors.
        for layer in replica.factored:
            if layer.catching and not layer.keeps_gradient and not layer.handed_over:
                replica.listener.factors_ready(layer)
        self._hand_over(complete_only=False)
        # Waits for the other ranks: what ends the wait, and what a lost rank does to it, is the strategy's matter.
        replica.listener.backward_done()
        self._settle()
        # With a single bucket the order of gradients changes nothing.
        if self.arrivals and len(replica.buckets) > 1:
            self._recut(self.arrivals)
        elif replica.exchanged_as_factors != factored_before:
            # `backward_done` has chosen factors for some parameters: their slots leave the buckets.
            replica.arrange([slot.name for slot in replica.slots])
        self.arrivals = None
        if replica.marks is not None:
            replica.marks.record(replica.buckets)
        if replica.checks is not None:
            replica.checks.pass_finished()

    def _make_void(self) -> None:
        """End a pass that a loss has interrupted. Its gradients become zero: what is in buckets is no gradient."""
        replica = self._replica
        if replica.on_void is not None:
            replica.on_void()
        for slot in replica.slots:
            if slot.tensor.grad is not None:
                slot.tensor.grad = torch.zeros_like(slot.tensor)
        for bucket in replica.buckets:
            bucket.expect()
        for layer in replica.factored:
            layer.slot.arrived = False
            layer.expect()
        self._kept.clear()
        self._next_bucket = 0
        self.running, replica.has_exchanged = False, True

    @torch.no_grad()
    def factors_caught(self, layer: FactoredLayer, pair: Pair) -> None:
        """Take a pair of factors of a layer's gradient. Called in backward, in place of the gradient's hook."""
        replica = self._replica
        pair = (replica.contribution.as_part_of_sum(pair[0]), pair[1])
        if layer.keeps_gradient:
            self._factors_caught_with_gradient(layer, pair)
            return
        # Autograd calls no hook of this parameter, so its virtual time passes here, and its arrival is reported here.
        if replica.compute_clock is not None:
            replica.compute_clock.gradient(layer.slot.name)
        if replica.on_caught is not None:
            replica.on_caught(layer.slot.name)
        with self._lock:
            try:
                if not replica.syncing:
                    replica.contribution.backward()
                elif not self.running:
                    self.start()
                if replica.is_void:
                    return
                # After `start`: its exchange must have the weight of this pass before factors are handed over.
                layer.catch(pair, stays=not replica.syncing)
                if replica.syncing and layer.complete:
                    replica.listener.factors_ready(layer)
            except RankLost as error:
                replica.note_loss(error)

    def _factors_caught_with_gradient(self, layer: FactoredLayer, pair: Pair) -> None:
        """Keep the factors and make the gradient as well, which then arrives as autograd would have it."""
        replica = self._replica
        if replica.syncing and layer.handed_over:
            raise ConfigError(
                f"the gradient of '{layer.slot.name}' was sent, and backward came to another use of the layer, in a "
                "graph older than the last forward pass. Go back through graphs in the order in which they were made, "
                "or do without factors."
            )
        layer.catch(pair, stays=True)
        layer.slot.touched = True
        if replica.syncing:
            self.advance()
        else:
            replica.contribution.backward()
        # The slot arrives by its hook, which autograd calls when it has been through all uses of the weight.

    def _settle(self) -> None:
        """Make the buckets' content the gradients and statistics of the model, and get ready for the next pass."""
        replica = self._replica
        for slot, value in self._kept:
            # No rank had a gradient for it in this pass: undo what the exchange made of the older one.
            if not _has_gradient(slot):
                slot.view.copy_(value)
        for bucket in replica.buckets:
            for slot in bucket.slots:
                if not bucket.of_parameters:
                    slot.tensor.copy_(slot.view)
                # A slot that this rank contributed to needs nothing: its `p.grad` is the view already.
                elif not (slot.touched and self._weight):
                    _settle_absent(slot)
            bucket.expect()
        for layer in replica.factored:
            layer.slot.arrived = False  # Slots exchanged as factors are in no bucket, whose `expect` would do it.
            layer.expect()
        if replica.left_out:
            for slot in replica.slots:
                # Autograd made a local gradient, which differs between ranks: the optimiser must not use it.
                if slot.name in replica.left_out:
                    slot.tensor.grad = None
        self._kept.clear()
        self._next_bucket = 0
        # Last: an error before this leaves the pass running, which the next forward pass refuses.
        self.running, replica.has_exchanged = False, True

    def _recut(self, arrivals: list[Slot]) -> None:
        """Cut the buckets anew, in the order in which rank 0 saw gradients arrive. Collective."""
        replica = self._replica
        numbers = {slot: number for number, slot in enumerate(replica.slots)}
        in_order = broadcast_json([numbers[slot] for slot in arrivals], replica.transport)
        # Parameters without a gradient in rank 0's first pass come last: they may never get one.
        remaining = sorted(set(numbers.values()) - set(in_order))
        replica.arrange([replica.slots[number].name for number in [*in_order, *remaining]])

    def _check_still_frozen(self) -> None:
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise unfrozen(name)


def _settle_absent(slot: Slot) -> None:
    """Settle a parameter to which this rank contributed nothing: its gradient is the other ranks', if any has one."""
    if _has_gradient(slot):
        slot.tensor.grad = slot.view
    elif slot.touched and slot.fresh:  # By samples of weight 0, and by nothing before them.
        slot.tensor.grad = None


def _has_gradient(slot: Slot) -> bool:
    """Whether any rank had a gradient for this parameter: its `has_grad` flag in the exchanged bucket is not 0."""
    if slot.tensor.is_meta:
        return slot.touched  # Without values, what holds here holds everywhere.
    return bool(slot.bucket.has_grad[slot.bucket.slots.index(slot)] != 0)
