"""Sending of replies: one outbox per worker, one send at a time, the shards that the next forward needs first.

How it works
------------
`reply` puts a status for a shard into a worker's outbox and wakes the worker's `send_replies`, a generator that runs
until the worker is gone and its outbox is empty. It sends one shard at a time and picks the highest shard index first:
buckets are numbered in the order of backward, so the last shards belong to the first layers of the next forward pass.

An outbox holds at most one reply per shard. A later reply replaces an earlier one that was not sent yet, and the values
that are sent are those at the time of sending: a slow worker skips versions instead of queueing them.

The worker on the server's own rank needs no message: the function given to `connect_local_worker` gets the header and
the values directly.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from tutti.strategies.parameter_server.messages.server.context import ServerContext
from tutti.strategies.parameter_server.messages.server.copies import CopySender
from tutti.strategies.parameter_server.messages.server.shard import ServerShard
from tutti.strategies.parameter_server.messages.wire import ReplyHeader, ReplyStatus, reply_tags
from tutti.transports.base import Operation, Signal

LocalDelivery = Callable[[int, ReplyHeader, Tensor | None], None]
"""Takes a reply to the worker of the server's own rank: shard index, header, values if there are any."""


@dataclass
class _Outbox:
    replies: dict[int, tuple[ServerShard, ReplyStatus]] = field(default_factory=dict)
    """Replies to send, by shard index."""
    wake: Signal | None = None
    """Set to wake `send_replies`, while that waits for something to send."""
    last_keep_alive_s: float = 0.0


class ReplySender:
    """Sends a server's replies to its workers."""

    def __init__(self, context: ServerContext) -> None:
        self._transport = context.transport
        self._membership = context.membership
        self._outboxes = {worker: _Outbox() for worker in context.membership.alive}
        self._deliver_locally: LocalDelivery = lambda *_: None
        self.copies: CopySender | None = None
        """Sends to the copies of this server's shards, where there are any."""

    def connect_local_worker(self, deliver: LocalDelivery) -> None:
        """Hand replies to the worker of this rank to `deliver`, in place of messages."""
        # Not an argument of the constructor: that worker shares the server's buffers, so it is made after the server.
        self._deliver_locally = deliver

    def reply(self, worker: int, shard: ServerShard, status: ReplyStatus) -> None:
        """Reply to a worker about a shard, now if it is on this rank, else when its outbox comes to it.

        Where the shard has a copy, that replies to workers of other ranks.
        """
        if shard.copies is not None and worker != self._transport.rank:
            shard.copies.reply(worker, shard, status)
        else:
            self.reply_from_here(worker, shard, status)

    def flush(self) -> None:
        """Send what copies have to do and to reply."""
        if self.copies is not None:
            self.copies.flush()

    def reply_from_here(self, worker: int, shard: ServerShard, status: ReplyStatus) -> None:
        """Reply to a worker about a shard or a copy that this server holds."""
        index = shard.spec.index
        if worker == self._transport.rank:
            values = shard.value_bytes() if status == ReplyStatus.VALUES else None
            self._deliver_locally(index, self._header(worker, shard, status), values)
            return
        self._outboxes[worker].replies[index] = shard, status
        self.wake(worker)

    def wake(self, worker: int) -> None:
        """Make `send_replies` of a worker look at its outbox, and at whether the worker is still alive."""
        if (wake := self._outboxes[worker].wake) is not None:
            wake.set()

    def keep_alive(self, shard: ServerShard) -> None:
        """Tell workers at the barrier, eight times per timeout, that the others still make progress."""
        now = self._transport.now()
        for worker in self._membership.at_barrier:
            outbox = self._outboxes[worker]
            if now - outbox.last_keep_alive_s > self._transport.timeout.total_seconds() / 8:
                outbox.last_keep_alive_s = now
                self.reply(worker, shard, ReplyStatus.KEEP_ALIVE)

    def send_replies(self, worker: int) -> Operation:
        """Send what is put into a worker's outbox, until the worker is gone and the outbox is empty."""
        outbox, transport = self._outboxes[worker], self._transport
        while worker in self._membership.alive or outbox.replies:
            if not outbox.replies:
                outbox.wake = transport.signal()
                yield outbox.wake
                outbox.wake = None
                continue
            index = max(outbox.replies)
            # Removed before the send: a reply that is asked for meanwhile is another one, with newer values.
            shard, status = outbox.replies.pop(index)
            header_tag, payload_tag = reply_tags(index)
            header = self._header(worker, shard, status)
            if status == ReplyStatus.VALUES:
                # The optimiser may change the values while they are sent, so a copy is sent.
                snapshot = shard.acquire_snapshot()
                sends = [transport.isend(header.pack(), worker, header_tag)]
                sends.append(transport.isend(snapshot.buffer, worker, payload_tag))
                # If this fails, the snapshot is not released and its buffer never reused: the transport may still read
                # it.
                yield from sends
                shard.release_snapshot(snapshot)
            else:
                yield transport.isend(header.pack(), worker, header_tag)

    def _header(self, worker: int, shard: ServerShard, status: ReplyStatus) -> ReplyHeader:
        """Return the header of a reply, with the shard's version and the worker's staleness as they are now."""
        version = shard.version
        if status == ReplyStatus.STOPPED:
            version = self._membership.stopped_by or 0
        elif status == ReplyStatus.LOST:
            version = self._membership.lost or 0
        num_bytes = shard.spec.num_bytes if status == ReplyStatus.VALUES else 0
        staleness = shard.staleness.get(worker, 0)
        return ReplyHeader(status, version, staleness, num_bytes, self._membership.leader)
