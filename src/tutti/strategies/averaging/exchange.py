"""Blocks of local steps at work: each rank trains by itself, and at the end of a block all ranks combine their changes.

How it works
------------
The user's optimiser steps on local gradients. `after_step` counts steps and time; when the schedule says that a block
is over, `_end_block` runs an exchange in three parts, as one operation of the transport's queue:

1. Status. Ranks send each other a `RankStatus` (block_status.py). From then on all of them know the same and take the
   same branch. If a loss was not finite somewhere, every rank raises. If no rank ends a block, there is nothing to
   sum.
2. Mean. The buckets hold this rank's change since the start of its block. They are averaged, weighted by samples,
   exactly or compressed, and so is the optimiser's state if asked for.
3. Apply. Each rank applies the mean change to the block's start (`BlockParameters.apply_mean`). `start` has the same
   bits on all ranks before and after.

Without overlap, `_end_block` waits for the exchange at once. With overlap it only waits for the exchange of the block
before, and the new one runs while the next block is computed. At most one exchange is pending (`_pending`); its
memory, the buckets, is not written until it has been waited for.

Ranks may take different numbers of steps. A rank that calls `consensus`, `state_dict` or `finish`, or has come to the
end of its data, sends its status with that intent. While another rank still ends blocks, the smallest intent, BLOCK,
wins: the waiting rank takes part in that block and sends its status again (`_synchronise`). It returns when all ranks
have come with the same intent. So nobody waits for a rank that waits for somebody else. A rank that is lost ends the
wait of all others through the transport (`RankLost`), and one that computes for long sends keep-alives.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tutti.collectives import native
from tutti.collectives.compressed import STAGE_BOUNDARY
from tutti.errors import NonFiniteLoss
from tutti.events import EXCHANGE, Event
from tutti.replica import Replica
from tutti.replica.state import share_buffers
from tutti.strategies.averaging.block_schedule import make_schedule
from tutti.strategies.averaging.block_status import (
    BlockStatus,
    Intent,
    RankStatus,
    StatusExchange,
    different_calls_error,
)
from tutti.strategies.averaging.optimizer_state import OptimizerStateMean, reset
from tutti.strategies.averaging.outer_optimizer import BlockParameters, OuterStep
from tutti.strategies.averaging.saved_state import SavedBlock
from tutti.strategies.base import Exchange
from tutti.strategies.compressed_means import CompressedMean
from tutti.strategies.means import CollectiveMean, when_filled
from tutti.transports import HostsTransport, SharesMemory, Transport, Work
from tutti.transports.base import Operation

if TYPE_CHECKING:
    from tutti.strategies.averaging.strategy import LocalSteps


class BlockExchange(SavedBlock, Exchange):
    """Runs local steps, and combines the ranks' changes at the end of every block."""

    def __init__(self, replica: Replica, transport: Transport, strategy: "LocalSteps", outer: OuterStep) -> None:
        super().__init__(replica, transport)
        codec = None if transport.size == 1 else strategy.codec
        if codec is not None and isinstance(transport, SharesMemory) and not isinstance(transport, HostsTransport):
            transport = transport.inner  # Packets travel as messages: shared memory sums only plain buckets.
        self._channel = transport
        self._strategy = strategy
        replica.allocate(transport, strategy.bucket_bytes, strategy.exact_below if codec is not None else 0)
        # Buckets hold changes of parameters, not gradients that become ready one by one: their order is fixed from the
        # start.
        replica.arrange([slot.name for slot in replica.slots])
        self._exact_mean = CollectiveMean(transport, lambda num_bytes: native)
        self._compressed_mean = None if codec is None else CompressedMean(replica, transport, codec)
        buckets = [] if replica.sizes_only else replica.buckets
        self._parameters = [BlockParameters(bucket, outer, strategy.overlap) for bucket in buckets]
        self._schedule = make_schedule(strategy.every, strategy.share, strategy.overlap)
        averages_state = strategy.optimizer_state == "average"
        self._optimizer_mean = OptimizerStateMean(replica, self._exact_mean) if averages_state else None
        # On a channel of its own: a status must not wait behind the sums of a pending exchange.
        self._status_exchange = StatusExchange(transport)
        self._unused_state: dict[str, Any] = {}
        self._pending: Work | None = None
        self._local_parameters: list[list[Tensor]] = []  # Kept while `consensus` shows the mean.
        self._local_buffers: list[Tensor] = []
        # Of the block in progress: steps, and samples trained; and the number of blocks that have ended.
        self._num_steps, self._weight, self._num_blocks = 0, 0.0, 0
        # Of the pending exchange: steps and samples that are not counted above any more, and what to call when it has
        # ended a block.
        self._sent_steps, self._sent_weight = 0, 0.0
        self._agreed: Callable[[], None] | None = None
        self._trained_s, self._since_s = 0.0, transport.now()
        self._exchange_s, self._sent_before = 0.0, self.bytes_sent
        replica.listen(self, to="samples")

    def metrics(self) -> dict[str, Any]:
        """`blocks` is the number of blocks that have ended."""
        return {"blocks": self._num_blocks}

    def before_step(self) -> None:
        weight = self.replica.take_samples()
        # NaN if the loss was not finite: it stays NaN, and the next status reports it to all ranks.
        self._weight += weight
        if weight == 0:  # A batch that does not count must not change parameters either.
            self.replica.hide_gradients()

    def after_step(self) -> None:
        self.replica.show_gradients()
        now_s = self._channel.now()
        self._num_steps += 1
        self._trained_s += now_s - self._since_s
        self._since_s = now_s
        # Trained time only: what was spent in exchanges and evaluation does not count towards a block's length.
        if self._schedule.is_over(self._num_steps, self._trained_s):
            self._end_block()
        else:
            # Others may have ended their block already, and wait for this rank's status.
            self._status_exchange.keep_alive()

    @torch.no_grad()
    def _end_block(self) -> None:
        """Exchange the block's change: at once, or with overlap while the next block is computed."""
        start_s = self._channel.now()
        if self._pending is not None:
            # Its memory, the buckets, is needed for this block's change: complete and apply it first.
            self._complete(keep_local_change=True)
        self._start_exchange(Intent.BLOCK)
        self._begin_block()
        if self._strategy.overlap:
            for parameters in self._parameters:
                # The change so far is on its way. The next block's change is counted from here.
                parameters.rebase()
        else:
            self._complete(keep_local_change=False)
        self._record(start_s)

    def _begin_block(self) -> None:
        """Count steps, samples and time from 0: those so far belong to the exchange that was started last."""
        self._sent_steps, self._sent_weight = self._num_steps, self._weight
        self._num_steps, self._weight, self._trained_s = 0, 0.0, 0.0

    def _record(self, start_s: float) -> None:
        """Record that this rank exchanged from `start_s` until now; training time counts again from now on."""
        self._since_s, sent = self._channel.now(), self.bytes_sent
        self.events.record(Event(EXCHANGE, start_s, self._since_s, sent - self._sent_before))
        self._sent_before = sent

    def _start_exchange(self, intent: Intent) -> None:
        """Start the exchange of this rank's change since its block began."""
        for parameters in self._parameters:
            parameters.pack_change()
        digest = 0 if self._optimizer_mean is None else self._optimizer_mean.pack()
        # For `every="auto"`: all ranks get all times, and so compute the same length of the next block.
        step_s = self._trained_s / self._num_steps if self._num_steps else 0.0
        local_status = RankStatus(intent, self._weight, step_s, self._exchange_s, digest)
        # The block goes on until `_begin_block`: an exchange for a collective call need not end it.
        self._sent_steps, self._sent_weight = 0, 0.0
        self._agreed = None if self.on_exchange is None else self.on_exchange()
        self._status, status_known = self._status_exchange.start(local_status)
        self._pending = self._start(self._exchange(self._status, status_known))

    def _start(self, operation: Operation) -> Work:
        """Queue an operation on the buckets, ordered after the kernels that fill them."""
        # One wait per device: the exchange must not read a bucket before the GPU has written the change into it.
        for flat in {bucket.flat.device: bucket.flat for bucket in self.replica.buckets}.values():
            operation = when_filled(flat, operation)
        return self._channel.start(operation)

    def _exchange(self, status: BlockStatus, status_known: Work) -> Operation:
        """Wait for the status of all ranks and, if a rank ends a block, average the buckets in place."""
        start_s = self._channel.now()
        yield status_known
        # The same on all ranks, so either all of them sum or none does. `_complete` raises or returns the intent.
        if status.non_finite or Intent.BLOCK not in status.intents:
            return
        mean = self._compressed_mean or self._exact_mean
        yield from interleaved(mean.steps(bucket, status.weights) for bucket in self.replica.buckets)
        # State of different shapes, where a rank has not stepped yet for example, is left as it is on every rank.
        if self._optimizer_mean is not None and status.same_optimizer_state:
            yield from self._optimizer_mean.steps(status.weights)
        # The first exchange also opened connections: it says nothing about the later ones.
        self._exchange_s = self._channel.now() - start_s if self._num_blocks else 0.0

    def _complete(self, keep_local_change: bool) -> Intent:
        """Wait for the pending exchange, apply it if it ended a block, and return the smallest intent of all ranks."""
        assert self._pending is not None
        self._pending.wait()
        self._pending = None
        status, intents = self._status, self._status.intents
        if status.non_finite:
            bad = [self._channel.world_ranks[rank] for rank in status.non_finite]
            raise NonFiniteLoss(self._channel.world_rank, bad, self.replica.steps)
        if Intent.BLOCK in intents:
            for parameters in self._parameters:
                parameters.apply_mean(keep_local_change)
            self._update_optimizer_state()
            # By times that all ranks have received, so that blocks stay equally long on all of them.
            self._schedule.update(status)
            self._num_blocks += 1
            if self._agreed is not None:
                self._agreed()
        # All ranks are in collective calls, but in different ones: none of these could ever complete.
        elif len(set(intents)) > 1:
            raise different_calls_error(intents, self._channel)
        return min(intents)

    def _abandon_exchange(self) -> None:
        """Go on without the pending exchange, which a lost rank has ended: its changes are still this rank's own."""
        if self._pending is None:
            return
        self._pending = None
        # With overlap, this block has begun after that exchange was started: both go on as one block.
        self._weight += self._sent_weight
        self._num_steps += self._sent_steps

    def _update_optimizer_state(self) -> None:
        """Average or reset this rank's optimiser state at the end of a block, if the strategy says so."""
        if self._optimizer_mean is not None and self._status.same_optimizer_state:
            self._optimizer_mean.unpack()
        elif self._strategy.optimizer_state == "reset":
            reset(self.replica.optimizer)

    # Collective calls between blocks.

    def _synchronise(self, intent: Intent) -> None:
        """Return when all ranks have come with the same intent, in the middle of a block or not."""
        if self._pending is not None:
            self._complete(keep_local_change=True)
        while True:
            self._start_exchange(intent)
            # The smallest intent of all ranks: as long as one of them ends a block, that comes first.
            if self._complete(keep_local_change=False) == intent:
                return
            self._begin_block()  # This rank's change was part of the block that another rank ended.

    def _set_to_mean(self) -> None:
        """Set the model to the mean of all ranks' parameters; all ranks have synchronised."""
        weights = self._status.weights
        # Without samples since the start of the block, all ranks still have the same parameters.
        if weights.any() and self._parameters:
            for parameters in self._parameters:
                parameters.pack_change()
            means = (self._exact_mean.steps(parameters.bucket, weights) for parameters in self._parameters)
            self._start(interleaved(means)).wait()
            for parameters in self._parameters:
                parameters.set_to_mean()
        share_buffers(self.replica.model, self.transport)

    @torch.no_grad()
    def consensus(self, optimizer: bool = False) -> None:
        start_s = self._channel.now()
        self._synchronise(Intent.CONSENSUS)
        # Before the model shows the mean: `restore_local` brings them back, and the block continues as if nothing had
        # happened.
        self._local_parameters = [[tensor.clone() for tensor in block.tensors] for block in self._parameters]
        self._local_buffers = [buffer.clone() for buffer in self.replica.model.buffers()]
        self._set_to_mean()
        self._record(start_s)

    @torch.no_grad()
    def restore_local(self) -> None:
        if not self._local_parameters:
            return  # Ranks have changed since, and this one continues from what the others had.
        for buffer, local in zip(self.replica.model.buffers(), self._local_buffers, strict=True):
            buffer.copy_(local)
        for parameters, values in zip(self._parameters, self._local_parameters, strict=True):
            torch._foreach_copy_(parameters.tensors, values)
        self._local_parameters, self._local_buffers = [], []
        self._since_s = self._channel.now()

    @contextmanager
    def out_of_data(self) -> Iterator[None]:
        with torch.no_grad():
            self._synchronise(Intent.END_OF_DATA)  # Others may still end blocks, with this rank's part.
        self._since_s = self._channel.now()
        yield

    @torch.no_grad()
    def finish(self) -> None:
        start_s = self._channel.now()
        self._synchronise(Intent.FINISH)
        self._set_to_mean()
        self._record(start_s)


def interleaved(operations: Iterable[Operation]) -> Operation:
    """Run all operations in turn, each up to its next stage boundary, so that links are busy while ranks wait."""
    # Every rank has the same buckets and boundaries, so all of them run the same stages in the same order.
    running = list(operations)
    while running:
        unfinished = []
        for operation in running:
            if (yield from _until_stage_boundary(operation)):
                unfinished.append(operation)
        running = unfinished


def _until_stage_boundary(operation: Operation) -> Generator[Work, None, bool]:
    """Run an operation up to its next stage boundary; return whether it has more to do."""
    for work in operation:
        if work is STAGE_BOUNDARY:
            return True
        yield work
    return False
