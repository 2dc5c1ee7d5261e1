"""Agreement of several servers on the updates of each version, under a counting consistency with a quorum.

How it works
------------
Under `SoftSync(n)` a version is made of any n updates. Updates reach each server in another order, so servers that
chose for themselves would mix, in one version of the model, gradients of different workers. Therefore the server of
the lowest rank decides. It keeps a ledger without values, to which every push of its first shard is added. Whenever
that ledger has a version due, the server appends the version's (worker, clock) pairs to its own `UpdateOrder` and sends
them to the other servers, which append them to theirs in `_receive_order`. Ledgers of all shards follow the order.

A message holds as many pairs of int64 as a version can have updates; fewer are padded with `NO_PULL`. `_receive_order`
waits for the deciding server only and ends when no worker is alive. If the deciding server is lost, its shards are too,
and training ends: the transport fails the receive, and each worker finds its own wait for that server failed.
"""

from collections.abc import Callable

import torch

from tutti.strategies.parameter_server.ledger import Ledger, Update, UpdateOrder
from tutti.strategies.parameter_server.messages.server.context import ServerContext
from tutti.strategies.parameter_server.messages.wire import NO_PULL, ORDER_TAG
from tutti.transports.base import Operation


class UpdateOrdering:
    """One server's part in the agreement: it decides the order of updates, or receives it."""

    def __init__(self, context: ServerContext) -> None:
        """Start with an empty order; `start` follows when decisions of another server can be handled."""
        self.order = UpdateOrder(context.membership.alive)
        self._consistency = context.config.consistency
        self._membership = context.membership
        self._transport = context.transport
        self._spawn = context.spawn
        # In the synchronous start a version may hold an update of every worker.
        self._num_numbers = 2 * max(self._consistency.quorum, len(context.config.workers))
        self._other_servers = context.other_servers
        # All servers know the same ranks, so they agree without a message.
        self._first_server = min([self._transport.rank, *self._other_servers])
        self._decider: Ledger | None = None
        """Decides which updates make each version, on the server of the lowest rank."""
        if self._transport.rank == self._first_server:
            self._decider = Ledger(self._consistency, self._membership.members)

    def start(self, on_order: Callable[[], None]) -> None:
        """Receive the decisions of the first server, on the others; `on_order` is called after each message."""
        if self._decider is None:
            self._spawn(self._receive_order(on_order))

    def record_push(self, update: Update) -> bool:
        """Count an update of the server's first shard; return whether that decided a version."""
        if self._decider is None:
            return False
        # A ledger without values: only the worker, its clock and the kind of its step matter for the order.
        synchronous = update.is_synchronous
        self._decider.push(Update(update.worker, 0, 0.0, 0.0, None, None, None, is_synchronous=synchronous))
        return self.decide()

    def decide(self) -> bool:
        """Decide the versions that are due, and send them to the other servers; return whether there were any."""
        decided = False
        while self._decider is not None and (due := self._decider.take_due()):
            decided = True
            # Named by worker and clock, which are the same on all servers: positions in a queue of arrivals are not.
            self.order.pending.append({(update.worker, update.clock) for update in due})
            message = torch.full((self._num_numbers,), NO_PULL, dtype=torch.int64, device="cpu")
            pairs = [number for update in due for number in (update.worker, update.clock)]
            message[: 2 * len(due)] = torch.tensor(pairs)
            # One message for all: nobody changes it while it is sent.
            for server in self._other_servers:
                self._spawn(self._send(message, server))
        return decided

    def restart(self) -> None:
        """Start again with an empty order."""
        if self._decider is not None:
            self._decider.restart()
        self.order.clear()

    def _send(self, message: torch.Tensor, server: int) -> Operation:
        yield self._transport.isend(message, server, ORDER_TAG)

    def _receive_order(self, on_order: Callable[[], None]) -> Operation:
        """Receive the decisions of the first server, as long as there are workers."""
        while self._membership.alive:
            message = torch.empty(self._num_numbers, dtype=torch.int64, device="cpu")
            yield self._transport.irecv(message, self._first_server, ORDER_TAG)
            pairs = message.view(-1, 2).tolist()
            # Padding of a version with fewer updates than the quorum is dropped.
            self.order.pending.append({(worker, clock) for worker, clock in pairs if worker != NO_PULL})
            on_order()
