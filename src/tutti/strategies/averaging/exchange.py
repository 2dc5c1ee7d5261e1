"""Blocks of local steps, and what ranks do together at their ends."""

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tutti.collectives import native
from tutti.collectives.compressed import STAGE_BOUNDARY
from tutti.errors import NonFiniteLoss
from tutti.events import EXCHANGE, Event
from tutti.replica import Replica
from tutti.replica.gathered import gather_state
from tutti.replica.state import share_buffers
from tutti.strategies.averaging import saved_state as saved
from tutti.strategies.averaging.block_status import Entry, Intent, Roll, RollCall, refuse_different
from tutti.strategies.averaging.cadence import cadence
from tutti.strategies.averaging.optimizer_state import StateMean, reset
from tutti.strategies.averaging.outer import Outer, Stretch
from tutti.strategies.base import Exchange
from tutti.strategies.compressed_means import CompressedMean
from tutti.strategies.means import CollectiveMean, when_filled
from tutti.transports import HostsTransport, SharesMemory, Transport, Work
from tutti.transports.base import Operation

if TYPE_CHECKING:
    from tutti.strategies.averaging.strategy import Blocks


class BlockExchange(Exchange):
    """Lets the optimiser of this rank step by itself, and at the end of a block goes on from what all ranks made.

    With overlap the exchange of a block runs behind the computation of the next, at whose end it is waited for: every
    rank then holds what all agree on and its own progress since.

    A rank that comes to `consensus`, `state_dict` or `finish` takes part in the blocks of those who are still on their
    way there, so that ranks may take different numbers of steps.
    """

    def __init__(self, replica: Replica, transport: Transport, strategy: "Blocks", outer: Outer) -> None:
        super().__init__(replica, transport)
        codec = None if transport.size == 1 else strategy.codec
        if codec is not None and isinstance(transport, SharesMemory) and not isinstance(transport, HostsTransport):
            transport = transport.inner  # What is encoded travels in messages.
        self._wire = transport
        self._strategy = strategy
        replica.allocate(transport, strategy.bucket_bytes, strategy.exact_below if codec is not None else 0)
        replica.arrange([slot.name for slot in replica.slots])
        self._exactly = CollectiveMean(transport, lambda num_bytes: native)
        self._compressed = None if codec is None else CompressedMean(replica, transport, codec)
        buckets = [] if replica.sizes_only else replica.buckets
        self._stretches = [Stretch(bucket, outer, strategy.overlap) for bucket in buckets]
        self._cadence = cadence(strategy.every, strategy.share, strategy.overlap)
        self._states = StateMean(replica, self._exactly) if strategy.optimizer_state == "average" else None
        self._calls = RollCall(transport)
        self._under_way: Work | None = None
        self._own: list[list[Tensor]] = []
        self._own_buffers: list[Tensor] = []
        self._steps, self._weight, self._blocks = 0, 0.0, 0
        self._trained_s, self._since_s = 0.0, transport.now()
        self._exchange_s, self._sent_before = 0.0, self.bytes_sent
        replica.listen(self, to="samples")

    def metrics(self) -> dict[str, Any]:
        return {"blocks": self._blocks}

    def before_step(self) -> None:
        weight = self.replica.take_samples()
        self._weight += weight
        if weight == 0:  # A batch that does not count.
            self.replica.hide_gradients()

    def after_step(self) -> None:
        self.replica.show_gradients()
        now_s = self._wire.now()
        self._steps, self._trained_s, self._since_s = self._steps + 1, self._trained_s + now_s - self._since_s, now_s
        if self._cadence.due(self._steps, self._trained_s):
            self._end_block()
        else:
            self._calls.beat()

    @torch.no_grad()
    def _end_block(self) -> None:
        start_s = self._wire.now()
        if self._under_way is not None:
            self._receive(since=True)
        self._send(Intent.BLOCK)
        self._begin_block()
        if self._strategy.overlap:
            for stretch in self._stretches:
                stretch.go_on()
        else:
            self._receive(since=False)
        self._record(start_s)

    def _begin_block(self) -> None:
        self._steps, self._weight, self._trained_s = 0, 0.0, 0.0

    def _record(self, start_s: float) -> None:
        """Write down that this rank has waited since then, and train on from now."""
        self._since_s, sent = self._wire.now(), self.bytes_sent
        self.events.record(Event(EXCHANGE, start_s, self._since_s, sent - self._sent_before))
        self._sent_before = sent

    def _send(self, intent: Intent) -> None:
        """Start the exchange of what was done since the last."""
        for stretch in self._stretches:
            stretch.pack()
        states = 0 if self._states is None else self._states.pack()
        step_s = self._trained_s / self._steps if self._steps else 0.0
        self._roll, called = self._calls.start(Entry(intent, self._weight, step_s, self._exchange_s, states))
        self._under_way = self._start(self._exchange(self._roll, called))

    def _start(self, steps: Operation) -> Work:
        for flat in {bucket.flat.device: bucket.flat for bucket in self.replica.buckets}.values():
            steps = when_filled(flat, steps)
        return self._wire.start(steps)

    def _exchange(self, roll: Roll, called: Work) -> Operation:
        start_s = self._wire.now()
        yield called
        if roll.refused or Intent.BLOCK not in roll.intents:
            return
        mean = self._compressed or self._exactly
        yield from in_turns(mean.steps(bucket, roll.weights) for bucket in self.replica.buckets)
        if self._states is not None and roll.states_alike:
            yield from self._states.steps(roll.weights)
        self._exchange_s = self._wire.now() - start_s if self._blocks else 0.0

    def _receive(self, since: bool) -> Intent:
        """Wait for the exchange under way, and go on from what it brought, if it ended a block; why all have come."""
        assert self._under_way is not None
        self._under_way.wait()
        self._under_way = None
        roll, intents = self._roll, self._roll.intents
        if roll.refused:
            raise NonFiniteLoss(self._wire.rank, roll.refused, self.replica.steps)
        if Intent.BLOCK in intents:
            for stretch in self._stretches:
                stretch.step(since)
            self._follow_states()
            self._cadence.learn(roll)
            self._blocks += 1
        elif len(set(intents)) > 1:
            raise refuse_different(intents, self._wire.rank)
        return min(intents)

    def _follow_states(self) -> None:
        if self._states is not None and self._roll.states_alike:
            self._states.unpack()
        elif self._strategy.optimizer_state == "reset":
            reset(self.replica.optimizer)

    # Together

    def _meet(self, intent: Intent) -> None:
        """Come together with all ranks, in the middle of a block."""
        if self._under_way is not None:
            self._receive(since=True)
        while True:
            self._send(intent)
            if self._receive(since=False) == intent:
                return
            self._begin_block()  # What was done is in the block that another rank ended.

    def _average(self) -> None:
        """Hold the mean of all ranks' parameters, which have come together."""
        weights = self._roll.weights
        if weights.any() and self._stretches:
            for stretch in self._stretches:
                stretch.pack()
            self._start(in_turns(self._exactly.steps(each.bucket, weights) for each in self._stretches)).wait()
            for stretch in self._stretches:
                stretch.agree()
        share_buffers(self.replica.model, self.transport)

    @torch.no_grad()
    def consensus(self) -> None:
        start_s = self._wire.now()
        self._meet(Intent.CONSENSUS)
        self._own = [[tensor.clone() for tensor in stretch.tensors] for stretch in self._stretches]
        self._own_buffers = [buffer.clone() for buffer in self.replica.model.buffers()]
        self._average()
        self._record(start_s)

    @torch.no_grad()
    def restore_local(self) -> None:
        for buffer, own in zip(self.replica.model.buffers(), self._own_buffers, strict=True):
            buffer.copy_(own)
        for stretch, values in zip(self._stretches, self._own, strict=True):
            torch._foreach_copy_(stretch.tensors, values)
        self._own, self._own_buffers = [], []
        self._since_s = self._wire.now()

    @torch.no_grad()
    def finish(self) -> None:
        start_s = self._wire.now()
        self._meet(Intent.FINISH)
        self._average()
        self._record(start_s)

    # Saving

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Where the block started, and what each rank has done since, with its optimiser."""
        self._meet(Intent.SAVE)
        start: dict[str, Tensor] = {}
        velocity: dict[str, Tensor] = {}
        own: dict[str, Tensor] = {}
        values = self._own or [stretch.tensors for stretch in self._stretches]  # Within consensus, or not.
        for stretch, mine in zip(self._stretches, values, strict=True):
            names = [slot.name for slot in stretch.bucket.slots]
            starts, velocities = stretch.saved()
            start.update(zip(names, starts, strict=True))
            velocity.update(zip(names, velocities, strict=False))
            own.update(zip(names, mine, strict=True))
        optimizer = self.replica.optimizer.state_dict()
        entry = {"own": own, "weight": self._weight, "steps": self._steps, "optimizer": optimizer}
        ranks = gather_state(entry, self._wire)
        compressed = None if self._compressed is None else self._compressed.state_dict()
        self._since_s = self._wire.now()
        return {
            "start": start,
            "velocity": velocity,
            "ranks": ranks,
            "block": self._cadence.length,
            "blocks": self._blocks,
            "coded": compressed,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; if ranks are now more or fewer, from the mean of what they had."""
        self._meet(Intent.SAVE)  # Nothing of before may be under way.
        ranks = state["ranks"]
        mine = ranks[self._wire.rank % len(ranks)]
        self._begin_block()
        own = mine["own"] if len(ranks) == self._wire.size else saved.mean(ranks)
        if len(ranks) == self._wire.size:
            self._steps, self._weight = mine["steps"], mine["weight"]
        for stretch in self._stretches:
            names = [slot.name for slot in stretch.bucket.slots]
            parts = (state["start"], state["velocity"], own)
            stretch.load(*([part[name] for name in names if name in part] for part in parts))
        self._cadence.length, self._blocks = state["block"], state["blocks"]
        self.replica.optimizer.load_state_dict(mine["optimizer"])
        if self._compressed is not None and state["coded"]:
            self._compressed.load_state_dict(state["coded"])
        self._since_s = self._wire.now()


def in_turns(many: Iterable[Operation]) -> Operation:
    """All of these steps, each up to where they pause, in turn: links are busy while ranks wait."""
    going = list(many)
    while going:
        left = []
        for steps in going:
            if (yield from _up_to_pause(steps)):
                left.append(steps)
        going = left


def _up_to_pause(steps: Operation) -> Generator[Work, None, bool]:
    """Whether there are more."""
    for work in steps:
        if work is STAGE_BOUNDARY:
            return True
        yield work
    return False
