"""Clipping of the mean gradient by its norm over the whole model, which no server holds alone.

How it works
------------
Under `BSP` and `SSP` with `clip`, all shards of all servers take step number c together. A server begins the step
when every member has pushed every one of its shards: it takes the due updates, makes their means, and sends the sum of
their squared norms to every other server. It finishes the step when the squares of all other servers for clock c are
here; the root of the sum gives the factor by which all servers scale. Between the two, ledgers count a version
whose step is not taken yet, so no pull is answered (`is_pending`).

A shard that has no update for clock c, because its workers were lost halfway through their pushes, is skipped. A server
that has no update at all still takes part as soon as it receives another server's square for clock c.

The wait for squares is ended by the other servers. If one of them is lost its shards are too: the receive fails, the
step stays pending, and the workers end because their own wait for the lost server fails.

Invariant: at most one joint step is pending, and servers take joint steps in the order of their clocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch

from tutti.strategies.parameter_server.ledger import Update
from tutti.strategies.parameter_server.messages.server.context import ServerContext
from tutti.strategies.parameter_server.messages.server.shard import ServerShard
from tutti.strategies.parameter_server.messages.wire import NORM_TAG
from tutti.strategies.parameter_server.shard_optimizer import clip_factor
from tutti.transports.base import Operation


@dataclass
class _JointStep:
    """A step of all shards that waits for the norms of the other servers' shards."""

    clock: int
    parts: list[tuple[ServerShard, list[Update], np.ndarray]]
    """Each shard with its updates and, per segment, whether it has a gradient."""
    square_norm: float
    """Squared norm of the means of this server's shards."""


class GlobalClipping:
    """Steps a server's shards together with those of all other servers, scaled by the norm of the whole gradient."""

    def __init__(self, context: ServerContext, shards: list[ServerShard]) -> None:
        """Step `shards`, all those of this server; `start` follows when norms of other servers can be handled."""
        assert context.config.clip is not None
        self._max_norm = context.config.clip
        self._shards = shards
        self._membership = context.membership
        self._transport = context.transport
        self._spawn = context.spawn
        self._other_servers = context.other_servers
        self._pending: _JointStep | None = None
        self._square_norms: dict[tuple[int, int], float] = {}
        """Squared norms received from other servers, by server and clock."""

    @property
    def is_pending(self) -> bool:
        """Whether ledgers count a version whose step is still to be taken."""
        return self._pending is not None

    def start(self, on_norm: Callable[[], None]) -> None:
        """Receive norms of the other servers; `on_norm` is called after each."""
        for server in self._other_servers:
            self._spawn(self._receive_norms(server, on_norm))

    def restart(self) -> None:
        """Abandon the pending step."""
        self._pending = None

    def try_step(self) -> bool:
        """Take the next joint step if it is due and all norms are known; return whether it was taken."""
        if self._pending is None and not self._begin():
            return False
        step = self._pending
        assert step is not None
        known = [self._square_norms.get((server, step.clock)) for server in self._other_servers]
        if None in known:
            return False
        for server in self._other_servers:  # All are here: norms of later clocks may have arrived too, and stay.
            del self._square_norms[server, step.clock]
        total = step.square_norm + sum(square for square in known if square is not None)
        factor = clip_factor(self._max_norm, sqrt(total))
        for shard, due, has_grad in step.parts:
            shard.step(due, has_grad, factor)
        self._pending = None
        # Skipped shards too: their ledgers have counted the version.
        for shard in self._shards:
            shard.publish()
        return True

    def _begin(self) -> bool:
        """Combine the updates of the next step, if all are here, and send their norm; return whether they were."""
        # A member that has pushed some shards only is waited for: it pushes the others, or it is lost.
        if any(shard.ledger.awaits_updates for shard in self._shards):
            return False
        clocks = [clock for shard in self._shards if (clock := shard.ledger.next_clock) is not None]
        # Another server has a step that this one has no update for: it takes part with a norm of 0.
        clocks += [clock for _, clock in self._square_norms]
        if not clocks:
            return False
        clock, parts, square_norm = min(clocks), [], 0.0
        for shard in self._shards:
            if shard.ledger.next_clock == clock and (due := shard.ledger.take_due()):
                has_grad = shard.combine(due)
                parts.append((shard, due, has_grad))
                square_norm += 0.0 if shard.optimizer is None else shard.optimizer.square_norm(has_grad)
            else:
                # All servers count every joint step on every shard, so that versions stay equal.
                shard.ledger.skip(clock)
        for server in self._other_servers:
            # The clock as float64, exact up to 2**53: one message of one dtype.
            message = torch.tensor([float(clock), square_norm], dtype=torch.float64, device="cpu")
            self._spawn(self._send(message, server))
        self._pending = _JointStep(clock, parts, square_norm)
        return True

    def _send(self, message: torch.Tensor, server: int) -> Operation:
        yield self._transport.isend(message, server, NORM_TAG)

    def _receive_norms(self, server: int, on_norm: Callable[[], None]) -> Operation:
        """Receive squared norms from another server, as long as there are workers."""
        while self._membership.alive:
            message = torch.empty(2, dtype=torch.float64, device="cpu")
            yield self._transport.irecv(message, server, NORM_TAG)
            # Kept by clock: another server may be a step ahead of this one.
            self._square_norms[server, int(message[0])] = float(message[1])
            on_norm()
