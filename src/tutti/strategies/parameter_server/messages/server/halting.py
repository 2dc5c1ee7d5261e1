"""`ServerHalt`: the end of waits at a server for versions that will not be made, because a rank is lost."""

from collections.abc import Callable

from tutti.errors import RankLost
from tutti.strategies.parameter_server.messages.server.context import ServerContext
from tutti.strategies.parameter_server.messages.server.replies import ReplySender
from tutti.strategies.parameter_server.messages.server.shard import ServerShard
from tutti.strategies.parameter_server.messages.wire import ReplyStatus


class ServerHalt:
    """Ends the waits of workers for versions that will not be made.

    Under `exact`, the loss of a worker freezes the server: a step needs the updates of all workers. Otherwise only the
    copies of a lost server's shards get no newer versions.
    """

    def __init__(
        self,
        context: ServerContext,
        shards: dict[int, ServerShard],
        copies: dict[int, ServerShard],
        replies: ReplySender,
        on_halt: Callable[[Exception], None],
    ) -> None:
        """Watch over `shards` and `copies` of others; `on_halt` ends a server that has no worker on its rank."""
        self._transport, self._config = context.transport, context.config
        self._membership = context.membership
        self._shards, self._copies = shards, copies
        self._replies = replies
        self._on_halt = on_halt

    def worker_lost(self, rank: int) -> None:
        """Make no more versions: a worker is lost, and its part of a step with it."""
        membership = self._membership
        if rank not in membership.alive or membership.is_frozen:
            return
        membership.lost, membership.is_frozen = self._transport.world_ranks[rank], True
        for worker in membership.alive - {rank}:
            for shard in self._shards.values():
                self._replies.reply(worker, shard, ReplyStatus.LOST)
        self._reply_for_copies(rank)
        self._replies.flush()
        if self._transport.rank not in self._config.workers:
            lost = membership.lost
            self._on_halt(
                RankLost(f"rank {self._transport.world_rank}: rank {lost} is gone.", {lost: "it answers no more"})
            )

    def source_lost(self, source: int) -> None:
        """The server whose shards have copies here is lost: these will not be newer."""
        if self._config.exact:
            self.worker_lost(source)
        if not self._membership.is_frozen:
            self._membership.lost = self._transport.world_ranks[source]
            self._reply_for_copies(source)

    def _reply_for_copies(self, lost: int) -> None:
        for worker in self._membership.alive - {lost}:
            for shard in self._copies.values():
                self._replies.reply_from_here(worker, shard, ReplyStatus.LOST)
