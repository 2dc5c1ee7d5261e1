"""Making of versions: takes the steps that are due on a server's shards, and answers the pulls that wait for them."""

from collections.abc import Callable
from typing import Any

from tutti.strategies.parameter_server.ledger import Update
from tutti.strategies.parameter_server.messages.server.clipping import GlobalClipping
from tutti.strategies.parameter_server.messages.server.context import ServerContext
from tutti.strategies.parameter_server.messages.server.ordering import UpdateOrdering
from tutti.strategies.parameter_server.messages.server.replies import ReplySender
from tutti.strategies.parameter_server.messages.server.shard import ServerShard
from tutti.strategies.parameter_server.messages.wire import NO_PULL, ReplyStatus


class VersionMaker:
    """Takes due steps and answers pulls, after every event that may have made either possible."""

    def __init__(
        self,
        context: ServerContext,
        shards: dict[int, ServerShard],
        replies: ReplySender,
        ordering: UpdateOrdering | None,
        clipping: GlobalClipping | None,
        on_settled: Callable[[], None],
    ) -> None:
        """Start at version 0.

        Args:
            context: the group, the workers and the records of this server.
            shards: the shards of this server, by index.
            replies: sends the values to those who pull them.
            ordering: agreement with other servers on the updates of each version, where one is needed.
            clipping: joint steps with other servers, where the mean gradient is clipped.
            on_settled: called when steps were taken or members changed: a barrier may be complete.
        """
        self.shards = shards
        """The shards of this server, by index."""
        self._config = context.config
        self._membership = context.membership
        self._replies = replies
        self._ordering = ordering
        self._clipping = clipping
        self._on_settled = on_settled

    def start(self) -> None:
        """Begin to receive what other servers send about orders and norms."""
        if self._ordering is not None:
            self._ordering.start(self.settle_all)
        if self._clipping is not None:
            self._clipping.start(lambda: self.settle(list(self.shards.values())))

    @property
    def is_idle(self) -> bool:
        """Whether every update that has arrived is applied."""
        stepping = self._clipping is not None and self._clipping.is_pending
        return not stepping and all(shard.ledger.is_idle for shard in self.shards.values())

    def pushed(self, shard: ServerShard, update: Update, wanted_version: int) -> None:
        """Go on after an update of a shard: take steps that are due, and answer pulls, the worker's own included."""
        worker = update.worker
        first_shard = min(self.shards)
        # The first shard stands for the whole update: a worker pushes every shard once per iteration.
        if self._ordering is not None and shard.spec.index == first_shard and self._ordering.record_push(update):
            self.settle(list(self.shards.values()))
        # After the order was settled, before this shard is: the update itself may make the wanted version.
        if wanted_version != NO_PULL:
            shard.waiting_pulls[worker] = wanted_version
        self.settle([shard], worker)
        # A push shows that training goes on, which workers at the barrier cannot see by themselves.
        self._replies.keep_alive(self.shards[first_shard])

    def settle_all(self) -> None:
        """Go on after a change of members or of the order: all shards may have a version due."""
        # A worker that left may have been the one that the next version waited for.
        if self._ordering is not None:
            self._ordering.decide()
            if positions := [shard.ledger.order_position for shard in self.shards.values()]:
                self._ordering.order.forget_before(min(positions))  # No shard here will ask for an earlier one.
        self.settle(list(self.shards.values()))
        self._on_settled()

    def settle(self, changed: list[ServerShard], puller: int | None = None) -> None:
        """Take the steps of some shards that are due, and answer their pulls.

        Args:
            changed: shards that may have a version due.
            puller: the worker that may just have asked for one of them.
        """
        if self._clipping is not None:
            # A joint step concerns all shards, not only the changed ones.
            while self._clipping.try_step():
                for shard in self.shards.values():
                    self.answer_pulls(shard)
                self._on_settled()
            if self._clipping.is_pending:
                return  # Ledgers count a version whose step is not taken: no pull may be answered yet.
        else:
            for shard in changed:
                while due := shard.ledger.take_due():
                    shard.step(due, shard.combine(due))
                shard.publish()
        for shard in changed:
            self.answer_pulls(shard, puller)
        self._replies.flush()

    def answer_pulls(self, shard: ServerShard, puller: int | None = None) -> None:
        """Reply to the waiting workers that may read a shard.

        Under a clocked consistency, if no version was made since the last call, only `puller` can be one of them: so
        a push costs no look at all other workers.
        """
        is_new = self._config.consistency.bound is None or shard.answered_version != shard.ledger.version
        shard.answered_version = shard.ledger.version
        candidates = [(worker, wanted) for worker, wanted in shard.waiting_pulls.items() if is_new or worker == puller]
        for worker, wanted in candidates:  # A copy, because answered pulls are removed.
            if self._membership.stopped_by is not None:
                self._replies.reply(worker, shard, ReplyStatus.STOPPED)
            elif shard.ledger.is_readable(worker, wanted):
                self._replies.reply(worker, shard, ReplyStatus.VALUES)
            else:
                continue
            del shard.waiting_pulls[worker]

    def load_state(self, state: dict[str, Any]) -> None:
        """Start again at version 0 from these parameters and this state of the optimiser (`copy_state` plus values)."""
        if self._ordering is not None:
            self._ordering.restart()
        if self._clipping is not None:
            self._clipping.restart()
        for shard in self.shards.values():
            load_shard(shard, state)

    def copy_state(self) -> dict[str, Any]:
        """Return a copy of the optimiser's state: for every segment the parameter's name, the range and the state."""
        optimizers = [shard.optimizer for shard in self.shards.values() if shard.optimizer is not None]
        segments = [
            [name, [segment.start, segment.stop, segment.is_whole], state]
            for optimizer in optimizers
            for name, segment, state in optimizer.copy_states()
        ]
        return {"segments": segments}


def load_shard(shard: ServerShard, state: dict[str, Any]) -> None:
    """Start a shard, or a copy of one, again at version 0 from its part of `VersionMaker.load_state`'s state."""
    shard.restart()
    if shard.optimizer is not None:
        shard.optimizer.values.copy_(state["values"][str(shard.spec.index)])
        shard.optimizer.load_state(state["optimizer"])
