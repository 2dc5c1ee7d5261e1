"""Copies of shards on another server, which the loss of a server leaves behind (chain replication, van Renesse 2004).

How it works
------------
Servers stand in a ring. The copy of every shard of a server is on the server `copy_offset` places behind it, which is
on another host where there is one. Workers push to the server of a shard, which makes the mean of the updates that a
version is made of, steps, and sends the mean on (`CopySender`). The other server takes the same step on its copy, with
the same options: the same operations on the same numbers, so that both hold the same bits (`CopyReceiver`). It then
replies to the workers that wait for the version. Only the worker on the shard's own rank is replied to by the shard
itself, without a message.

So a mean goes over the network in place of the values that the copy's own worker would have pulled, and with colocated
servers a copy costs no bytes where every version is pulled by everyone (`BSP`). It costs another step of the optimiser
on each rank, and the time that a mean takes from one server to the other before values can be sent.

Invariant: a version that a worker has read is on both servers, or the worker is on the server's own rank. Whichever
server is lost, the values and the optimiser's state of every version that a living worker has seen survive.

A push is safe as soon as a later version was read: there is no other acknowledgement. Under `exact` (`BSP`), a step of
a worker is over when it has read the version which that step makes. The server alone may be ahead, by one version, of
the steps that are over somewhere. It keeps what was before its last step (`ShardOptimizer.keep_previous`), as copies
do. When a rank is lost, servers make no more versions (`Server.halt`): a shard whose updates are all here has stepped,
another one has not, and a step that is over nowhere is undone on all of them. Under other consistencies, servers go on
with the workers that are left, as they do without copies, and what the lost server had not sent on is lost.

Messages to a copy are in the order of its server's steps, under one pair of tags. A header says what to do; the mean
follows, if there is a step with gradients. The end of the header has a reply for each worker. A step and the replies
that it allows are sent as one message (`flush`).

Waits: `CopyReceiver` waits for the server alone, without a deadline. The wait is ended by the last message of that
server (`COPY_END`), which it sends when no worker is left, or by its loss. Then everyone who asks about these shards is
replied `LOST`, or would wait for the living server of a copy that gets no more versions.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tutti.errors import RankLost
from tutti.strategies.parameter_server.messages.server.context import ServerContext
from tutti.strategies.parameter_server.messages.wire import (
    COPY_PAYLOAD_TAG,
    COPY_TAG,
    ReplyStatus,
    RequestFormat,
    RequestHeader,
    RequestKind,
)
from tutti.transports.base import Operation

if TYPE_CHECKING:
    from tutti.strategies.parameter_server.messages.server.shard import ServerShard

_STALENESS_BITS = 24
_MOST_STALE = 2**_STALENESS_BITS - 1


class CopyFormat:
    """Packs and parses messages to a copy: a request, then a status and the staleness for each worker."""

    def __init__(self, requests: RequestFormat, num_workers: int) -> None:
        self._requests = requests
        self._replies_start = -(-requests.num_bytes // 4) * 4
        self.num_bytes = self._replies_start + 4 * num_workers

    def pack(
        self, header: RequestHeader, replies: np.ndarray, options: np.ndarray | None, has_grad: np.ndarray | None
    ) -> Tensor:
        """Return a message as bytes; `replies` has the status and staleness by position of the worker, or 0."""
        message = self.empty()
        message[: self._requests.num_bytes] = self._requests.pack(header, options, has_grad)
        message.numpy()[self._replies_start :].view(np.int32)[:] = replies
        return message

    def empty(self) -> Tensor:
        """Return memory to receive a message."""
        return torch.empty(self.num_bytes, dtype=torch.uint8, device="cpu")

    def parse(self, message: Tensor) -> tuple[RequestHeader, np.ndarray, np.ndarray, np.ndarray]:
        """Return a message's header, options, flags and replies."""
        header, options, has_grad = self._requests.parse(message[: self._requests.num_bytes])
        return header, options, has_grad, message.numpy()[self._replies_start :].view(np.int32)


@dataclass
class _CopyMessage:
    """A message to a copy that is not sent yet."""

    shard: "ServerShard"
    replies: np.ndarray
    options: np.ndarray | None = None
    has_grad: np.ndarray | None = None
    factor: float = 1.0
    mean: Tensor | None = None
    version: int = -1
    """The version that the step makes; -1 if there is none."""


class CopySender:
    """Sends the steps of this server's shards to the server that has their copies, and the replies that it gives."""

    def __init__(self, context: ServerContext, target: int) -> None:
        """Send to rank `target`."""
        self.target = target
        self._context = context
        self._transport = context.transport
        self._format = CopyFormat(context.config.request_format, len(context.config.workers))
        self._positions = {worker: position for position, worker in enumerate(context.config.workers)}
        self._records: dict[int, _CopyMessage] = {}

    def stepped(self, shard: "ServerShard", options: np.ndarray | None, has_grad: np.ndarray, factor: float) -> None:
        """A shard has taken a step by the mean that its optimiser has; without options, it counts and changes nothing.

        Called before `shard.version` is moved on.
        """
        if (record := self._records.get(shard.spec.index)) is not None and record.version >= 0:
            self._send_record(self._records.pop(shard.spec.index))  # One step in a message.
        record = self._record(shard)
        record.version = shard.ledger.version
        if options is not None:
            record.options, record.has_grad, record.factor = options, has_grad, factor
            # A copy: the next step makes its mean in the same memory.
            record.mean = shard.copy_mean()

    def reply(self, worker: int, shard: "ServerShard", status: ReplyStatus) -> None:
        """Let the copy of a shard reply to a worker, when it has the steps so far."""
        staleness = min(_MOST_STALE, max(0, shard.staleness.get(worker, 0)))
        self._record(shard).replies[self._positions[worker]] = (status << _STALENESS_BITS) | staleness

    def flush(self) -> None:
        """Send what there is to send."""
        while self._records:
            self._send_record(self._records.pop(next(iter(self._records))))

    def end(self, done: Callable[[], None]) -> None:
        """Send the last message, then call `done`."""
        self.flush()
        self._context.spawn(self._end(done))

    def _record(self, shard: "ServerShard") -> _CopyMessage:
        index = shard.spec.index
        if index not in self._records:
            self._records[index] = _CopyMessage(shard, np.zeros(len(self._positions), dtype=np.int32))
        return self._records[index]

    def _send_record(self, record: _CopyMessage) -> None:
        membership = self._context.membership
        kind = RequestKind.COPY_REPLY if record.version < 0 else RequestKind.COPY_STEP
        header = RequestHeader(
            kind,
            record.shard.spec.index,
            max(0, record.version),
            -1 if membership.stopped_by is None else membership.stopped_by,
            0 if record.mean is None else record.mean.nbytes,
            record.factor,
            -1.0 if membership.lost is None else float(membership.lost),
        )
        message = self._format.pack(header, record.replies, record.options, record.has_grad)
        self._context.spawn(self._send(message, record))

    def _send(self, message: Tensor, record: _CopyMessage) -> Operation:
        # Both begin before either is awaited, as a worker's pushes do.
        sends = [self._transport.isend(message, self.target, COPY_TAG)]
        if record.mean is not None:
            sends.append(self._transport.isend(record.mean, self.target, COPY_PAYLOAD_TAG))
        yield from sends
        if record.mean is not None:
            record.shard.buffers.give_back(record.mean)

    def _end(self, done: Callable[[], None]) -> Operation:
        replies = np.zeros(len(self._positions), dtype=np.int32)
        message = self._format.pack(RequestHeader(RequestKind.COPY_END), replies, None, None)
        with suppress(RankLost):  # It may have seen all workers go, and have ended before.
            yield self._transport.isend(message, self.target, COPY_TAG)
        done()


class CopyReceiver:
    """Keeps the copies of another server's shards, and replies to workers in its place."""

    def __init__(
        self,
        context: ServerContext,
        source: int,
        shards: "dict[int, ServerShard]",
        reply: "Callable[[int, ServerShard, ReplyStatus], None]",
    ) -> None:
        """Keep copies of the shards of rank `source`; `reply` sends a reply to a worker."""
        self.shards = shards
        """The copies, by index."""
        self._context = context
        self.source = source
        """The rank of that server."""
        self._reply = reply
        self._format = CopyFormat(context.config.request_format, len(context.config.workers))

    def receive(self, on_loss: Callable[[int], None]) -> Operation:
        """Follow the server until its end; `on_loss` is called if it is lost before."""
        transport, membership = self._context.transport, self._context.membership
        try:
            while True:
                # New memory every time: the optimiser keeps a view of the options in it.
                message = self._format.empty()
                yield transport.irecv(message, self.source, COPY_TAG)
                header, options, has_grad, replies = self._format.parse(message)
                if header.kind == RequestKind.COPY_END:
                    return
                shard, payload = self.shards[header.shard], None
                if header.num_bytes:
                    payload = shard.mean_buffer(header.num_bytes)
                    yield transport.irecv(payload, self.source, COPY_PAYLOAD_TAG)
                if membership.is_frozen:
                    return  # What this copy holds was saved.
                if header.kind == RequestKind.COPY_STEP:
                    shard.take_step(header.base_version, payload, options, has_grad, header.weight)
                self._pass_on(shard, header, replies)
        except RankLost:
            if membership.alive:
                on_loss(self.source)

    def _pass_on(self, shard: "ServerShard", header: RequestHeader, replies: np.ndarray) -> None:
        membership = self._context.membership
        if header.wanted_version >= 0:
            membership.stopped_by = header.wanted_version
        if header.norm >= 0:
            membership.lost = int(header.norm)
        for position in np.flatnonzero(replies):
            worker, code = self._context.config.workers[position], int(replies[position])
            shard.staleness[worker] = code & _MOST_STALE
            self._reply(worker, shard, ReplyStatus(code >> _STALENESS_BITS))
