"""Pulling: receives newer versions of shards in the background, and loads them into the model in the training thread.

How it works
------------
A pull has three stages. (1) A push asks for a version, and its generator goes on to `receive`, which runs concurrently
with the training thread and fills `WorkerShard.received` and `reply`. (2) The training thread calls `wait` for a shard
that it is about to use. `wait` returns at once while the model is fresh enough for the consistency; else it blocks
until the generator is done. (3) `wait` copies the values into the model. Parameters therefore change only in the
training thread, never while a forward or backward pass reads them.

The wait is ended by the shard's server. That server in turn waits for other workers only while they are members: see
`messages/server/__init__.py`. If the server is lost, `RequestSender.wait` raises `RankLost`.
"""

from torch import Tensor

from tutti.errors import NonFiniteLoss, RankLost, WorkerDropped
from tutti.events import PULL, Event
from tutti.strategies.parameter_server.messages.wire import ReplyHeader, ReplyStatus, reply_tags
from tutti.strategies.parameter_server.messages.worker.context import WorkerContext
from tutti.strategies.parameter_server.messages.worker.requests import RequestSender
from tutti.strategies.parameter_server.messages.worker.shard import WorkerShard
from tutti.strategies.parameter_server.staleness_bound import staleness_bound
from tutti.transports.base import Operation


class ShardPuller:
    """Receives shards from servers and loads them into the model."""

    def __init__(self, context: WorkerContext, shards: list[WorkerShard], requests: RequestSender) -> None:
        self.leader = context.config.workers[0]
        """The lowest rank of a living worker, as servers reported last."""
        self._context = context
        self._shards = shards
        self._transport = context.transport
        self._requests = requests

    def receive(self, shard: WorkerShard) -> Operation:
        """Receive the reply about a shard, and its values if they follow."""
        if shard.reader == self._transport.rank:
            # The server may have replied while the push was handed over: then there is nothing to wait for.
            while shard.reply is None or shard.reply.status == ReplyStatus.KEEP_ALIVE:
                if shard.lost is not None:
                    shard.reply = shard.lost
                    return
                shard.reply, shard.local_reply = None, self._transport.signal()
                yield shard.local_reply
                shard.local_reply = None
            return
        header_tag, payload_tag = reply_tags(shard.spec.index)
        reply = ReplyHeader(ReplyStatus.KEEP_ALIVE)
        # Each KEEP_ALIVE moves the deadline of the wait on.
        while reply.status == ReplyStatus.KEEP_ALIVE:
            message = ReplyHeader.empty()
            yield self._transport.irecv(message, shard.reader, header_tag)
            reply = ReplyHeader.parse(message)
        if reply.status == ReplyStatus.VALUES:
            yield self._transport.irecv(shard.receive_buffer(), shard.reader, payload_tag)
        shard.reply = reply

    def deliver_locally(self, shard_index: int, reply: ReplyHeader, values: Tensor | None) -> None:
        """Take a reply of the server on this rank. Runs in the thread of the transport, as `receive` does."""
        shard = self._shards[shard_index]
        if reply.status == ReplyStatus.LOST:
            # Of the pull that waits, or of the next one: the values of the last one may not be loaded yet.
            shard.lost = reply
            if shard.local_reply is not None:
                shard.local_reply.set()
            return
        if values is not None and shard.received is not None:
            # At once: the server's next step changes these values.
            shard.receive_buffer().copy_(values)
        shard.reply = reply
        if shard.local_reply is not None:
            shard.local_reply.set()

    def wait(self, shard: WorkerShard, force: bool = False) -> None:
        """Wait for a shard's pending pull and load it, if the next iteration needs it or `force` is set."""
        if shard.pending_pull is None:
            return
        bound = staleness_bound(self._context.config.consistency, self._context.replica)
        start_s = self._transport.now()
        # Fresh enough for the iteration of this clock: the pull may go on in the background.
        if bound is not None and not force and shard.version >= shard.clock - bound:
            return
        self._requests.wait(shard.pending_pull)
        shard.pending_pull = None
        self._context.events.record(Event(PULL, start_s, self._transport.now()))
        self.load(shard)
        # Under a clocked consistency the pusher knows the staleness itself, and has counted it.
        if bound is None and shard.spec.index == 0:
            assert shard.reply is not None
            self._context.staleness[shard.reply.staleness] += 1

    def load(self, shard: WorkerShard) -> None:
        """Copy received values into the model, or raise what the server replied instead."""
        reply, world_ranks = shard.reply, self._transport.world_ranks
        rank = self._transport.world_rank
        assert reply is not None
        if reply.status == ReplyStatus.STOPPED:
            # Before the error: servers must know that this worker will not come back.
            self._requests.disconnect_after_stop()
            raise NonFiniteLoss(rank, [world_ranks[reply.version]], self._context.replica.steps)
        if reply.status == ReplyStatus.LOST:
            raise RankLost(
                f"rank {rank}: rank {reply.version} is gone, and with it its part of what this rank waits for. "
                "Workers may come and go in an elastic run (tutti run --workers MIN:MAX).",
                {reply.version: "it answers no more"},
            )
        if reply.status == ReplyStatus.REJECTED:
            raise WorkerDropped(
                f"rank {rank}: the server on rank {world_ranks[shard.server]} rejected an update of shard "
                f"{shard.spec.index} as malformed, and takes nothing more from this worker. The output of that "
                "rank says what was wrong."
            )
        # In a dry run there are no values to copy, but versions count as in a real run.
        shard.version = reply.version
        self.leader = reply.leader
        shard.copy_to_model()
