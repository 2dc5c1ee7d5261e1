"""Joining, leaving, barriers, stops and losses of workers, as one server sees them."""

import logging
from collections.abc import Callable

from tutti.strategies.parameter_server.messages.server.context import ServerContext
from tutti.strategies.parameter_server.messages.server.replies import ReplySender
from tutti.strategies.parameter_server.messages.server.versions import VersionMaker
from tutti.strategies.parameter_server.messages.wire import ReplyStatus

_log = logging.getLogger("tutti")


class WorkerLifecycle:
    """Changes a server's membership, and does what follows from each change.

    Every change that takes a worker out of `members` may make a version due, answer a pull or complete the barrier, so
    it ends with `VersionMaker.settle_all`. That is how waits for a worker that is gone come to an end.
    """

    def __init__(
        self, context: ServerContext, versions: VersionMaker, replies: ReplySender, on_empty: Callable[[], None]
    ) -> None:
        """Watch over the workers of a server; `on_empty` is called when the last worker is gone."""
        self._rank, self._world_ranks = context.transport.rank, context.transport.world_ranks
        self._config = context.config
        self._membership = context.membership
        self._other_servers = context.other_servers
        self._versions = versions
        self._replies = replies
        self._on_empty = on_empty

    def enter_barrier(self, worker: int) -> None:
        """Let a worker wait for all others; versions no longer wait for it."""
        self._membership.at_barrier.add(worker)
        self.leave(worker)
        # It came after the stop: `stop` again, to answer this worker too.
        if self._membership.stopped_by is not None:
            self.stop(self._membership.stopped_by)

    def leave(self, worker: int) -> None:
        """Make versions without a worker until it joins again."""
        # Versions and pulls of others may have waited for this worker only: settled now, or they would wait for ever.
        self._membership.members.discard(worker)
        self._versions.settle_all()

    def join(self, workers: list[int]) -> None:
        """Wait for these workers from the next version on, and reply to them with all shards."""
        self._membership.members.update(workers)
        for shard in self._versions.shards.values():
            for worker in workers:
                shard.ledger.join(worker)
                # It may have pushed before it left. Then it reads when those updates are in, else at once.
                bound = self._config.consistency.bound or 0
                shard.waiting_pulls[worker] = shard.ledger.clock(worker) - bound
                self._versions.answer_pulls(shard, worker)

    def stop(self, worker: int) -> None:
        """Reply `STOPPED` to all workers that wait here; later pulls and barriers get the same reply as they begin."""
        self._membership.stopped_by = worker
        for other in self._membership.alive:
            for shard in self._versions.shards.values():
                # Only workers that wait read a reply. The others get theirs when they next pull or enter a barrier.
                if other in self._membership.at_barrier or other in shard.waiting_pulls:
                    self._replies.reply(other, shard, ReplyStatus.STOPPED)
            self._membership.at_barrier.discard(other)
        for shard in self._versions.shards.values():
            shard.waiting_pulls.clear()

    def remove(self, worker: int) -> None:
        """Go on without a worker for good."""
        self._membership.remove(worker)
        for shard in self._versions.shards.values():
            shard.waiting_pulls.pop(worker, None)
        self._replies.wake(worker)  # Its sending loop ends once the outbox is empty.
        self._versions.settle_all()
        if not self._membership.alive:
            self._on_empty()

    def lose(self, worker: int, reason: str) -> None:
        """Go on without a worker whose connection failed."""
        if worker in self._membership.alive:
            self._log_departure(worker, reason)
            # Under an agreed order, the server that decides may not have received what this one has.
            for shard in self._versions.shards.values():
                shard.ledger.discard_updates_from(worker)
            self.remove(worker)

    def reject(self, worker: int, reason: str) -> None:
        """Reply `REJECTED` to a worker that sent a malformed request, and go on without it."""
        # Replies first: once the worker is removed, its sending loop ends as soon as the outbox is empty.
        for shard in self._versions.shards.values():
            self._replies.reply(worker, shard, ReplyStatus.REJECTED)
        reason = f"it was dropped, having sent {reason}; the parameters stay as they were"
        self._log_departure(worker, reason, on_every_server=True)
        self.remove(worker)

    def complete_barrier(self) -> None:
        """If every living worker is at the barrier and every update is applied, let all of them join again."""
        if self._versions.is_idle and self._membership.is_barrier_complete:
            workers = sorted(self._membership.at_barrier)
            self._membership.at_barrier.clear()  # Before joining: a worker that enters again is at the next barrier.
            self.join(workers)

    def _log_departure(self, worker: int, reason: str, on_every_server: bool = False) -> None:
        """Warn that a worker is gone, on one server only unless `on_every_server`."""
        # All servers see a lost worker go. One of them logs it: the first that is not on the worker's own rank.
        if not on_every_server and self._rank != min({self._rank, *self._other_servers} - {worker}):
            return
        shards = iter(self._versions.shards.values())
        clock = next((shard.ledger.clock(worker) for shard in shards), 0)
        num_left = len(self._membership.alive) - 1
        rest = "and its server with it" if worker in self._config.servers else f"and {num_left} go on"
        ranks = self._world_ranks[self._rank], self._world_ranks[worker]
        _log.warning("rank %d: worker %d left at clock %d, %s: %s", *ranks, clock, rest, reason)
