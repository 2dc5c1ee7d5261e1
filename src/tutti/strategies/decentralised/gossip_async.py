"""Asynchronous gossip: each rank averages with one neighbour at a time (AD-PSGD, Lian et al. 2018).

How it works
------------
A rank has *values*, which its neighbours may change at any time, and computes with a copy of them (`base`). After every
step it adds the step's change to the values and copies them anew.

At most one request of a rank is under way. It sends its values x to a random neighbour as `PAIR_REQUEST`. The
neighbour, with values y, adds d = (x - y) / 2 to its own and replies with d (`PAIR_REPLY`); the requester subtracts d
from its values, which may have changed meanwhile. What one rank gains, the other loses: the sum over ranks stays the
same, whatever happens between request and reply.

Two ranks may ask each other at the same time. If both moved half way twice, they would swap their values and come no
closer. So the lower rank declines: it replies without values, and only its own request counts. Both see that requests
have crossed, because messages of one rank arrive in order: its request before its reply.

Who writes: the values are changed in the transport's thread only, by steps and messages in turn. Waits: a rank takes at
most `MOST_STEPS` steps during one request and then waits for the reply. Otherwise ranks whose steps are much shorter
than a round trip would hardly average, and drift apart. The reply does not wait for the neighbour's own steps, because
its transport's thread sends it. A rank that enters an averaging round first waits for its outstanding reply, too. If
the neighbour is lost, the request is forgotten (`peer_lost`), which ends both waits.
"""

from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tutti.errors import PacketError
from tutti.strategies.decentralised.algorithm import PeerAlgorithm, PeerContext
from tutti.strategies.decentralised.cost import MOST_STEPS
from tutti.strategies.decentralised.graphs import topology_for
from tutti.strategies.decentralised.routing import undirected
from tutti.strategies.decentralised.wire import PeerMessageHeader, PeerMessageKind
from tutti.strategies.resumable import KnownSteps
from tutti.transports.base import Operation

if TYPE_CHECKING:
    from tutti.strategies.decentralised.strategies import Gossip


class AsyncGossip(PeerAlgorithm):
    """Averages pairwise with one neighbour after the other, while training goes on."""

    def __init__(self, context: PeerContext, strategy: "Gossip") -> None:
        super().__init__(context)
        self.topology = topology_for(strategy.graph, context.group.transport.size)
        self._graph = undirected(self.topology)
        self._values = self._model.copy(context.base)
        self._requested: int | None = None
        """The neighbour whose reply is outstanding."""
        self._num_steps = 0
        self._first_step = 0
        """The clock at which this run, or part of a run, has begun."""
        self._requested_at = 0
        """Number of steps at the last request."""
        # Another sequence on every rank: which neighbour is asked need not be agreed on.
        self._random = Random(context.rank)

    @property
    def clock(self) -> int:
        return self._num_steps

    def metrics(self) -> dict[str, Any]:
        return {"spectral_gap": self.topology.over(sorted(self._group.alive)).spectral_gap}

    def exchange_step(self) -> None:
        self._context.wait(self._add_step(self._model.change_since(self._context.base)))
        self._model.write_model(self._context.base)

    def shift(self, change: Tensor) -> Operation:
        self._add(change)
        self._copy_values()
        yield from ()

    @property
    def own_values(self) -> tuple[Tensor, float]:
        return self._values, 1.0

    def restart(self, values: Tensor, weight: float, clock: int) -> Operation:
        self._num_steps = self._requested_at = self._first_step = clock
        if not self._model.sizes_only:
            self._values.copy_(values)
        self._copy_values()
        yield from ()

    def _add_step(self, change: Tensor) -> Operation:
        """Add a step's change to the values, and begin to average with a neighbour if no request is under way."""
        if self._num_steps - self._requested_at >= MOST_STEPS:
            yield from self._group.wait_until(lambda: self._requested is None)
        # Added, not copied: neighbours may have changed the values while this rank computed its step.
        self._add(change)
        self._copy_values()
        self._num_steps += 1
        neighbours = [peer for peer in self._graph.neighbours(self._context.rank) if peer in self._group.alive]
        if self._requested is None and neighbours:
            self._requested = self._random.choice(neighbours)
            self._requested_at = self._num_steps
            values = self._model.copy(self._values)  # The values may change before the message is sent.
            self._group.send(self._requested, self._header(PeerMessageKind.PAIR_REQUEST, values), values)
        self._rounds.send_keep_alives()

    def _header(self, kind: PeerMessageKind, values: Tensor) -> PeerMessageHeader:
        steps = self._num_steps - self._first_step
        return PeerMessageHeader(kind, clock=self._num_steps, num_bytes=values.nbytes, steps=steps)

    def _copy_values(self) -> None:
        """Make `base` the values of this moment, from which the next step is computed."""
        if not self._model.sizes_only:
            self._context.base.copy_(self._values)

    @torch.no_grad()
    def _add(self, change: Tensor, factor: float = 1.0) -> None:
        views = zip(self._model.bucket_views(self._values), self._model.bucket_views(change), strict=True)
        for values, changes in views:
            values.add_(changes, alpha=factor)

    def receive(self, peer: int, header: PeerMessageHeader, payload: Tensor | None) -> None:
        if header.kind not in (PeerMessageKind.PAIR_REQUEST, PeerMessageKind.PAIR_REPLY):
            self._rounds.receive(peer, header, payload)
            return
        # A reply without values: requests have crossed, and the neighbour counts on the other one.
        declined = header.kind == PeerMessageKind.PAIR_REPLY and header.num_bytes == 0
        if not declined and (payload is None or payload.nbytes != self._model.num_bytes):
            raise PacketError(f"values of {header.num_bytes} bytes, wanted {self._model.num_bytes}")
        self._group.clocks[peer] = header.clock
        if header.kind == PeerMessageKind.PAIR_REQUEST and peer == self._requested and self._context.rank < peer:
            self._group.send(peer, PeerMessageHeader(PeerMessageKind.PAIR_REPLY, clock=self._num_steps))
        elif header.kind == PeerMessageKind.PAIR_REQUEST:
            assert payload is not None
            self._move_half_way(payload)  # The payload now holds the change: it is sent back without a copy.
            self.known_steps[peer] = KnownSteps(header.steps, header.steps)
            self._group.send(peer, self._header(PeerMessageKind.PAIR_REPLY, payload), payload)
        # Any other reply was not asked for, and is ignored.
        elif peer == self._requested:
            if payload is not None:
                self._add(payload, -1.0)
                self.known_steps[peer] = KnownSteps(header.steps, header.steps)
            self._requested = None

    @torch.no_grad()
    def _move_half_way(self, peer_values: Tensor) -> None:
        """Move half of the way to a peer's values, and overwrite those with the change that was made."""
        views = zip(self._model.bucket_views(self._values), self._model.bucket_views(peer_values), strict=True)
        for values, change in views:
            # In place, in the message: d = (x - y) / 2, then y + d.
            change.sub_(values).mul_(0.5)
            values.add_(change)

    def peer_lost(self, peer: int) -> None:
        super().peer_lost(peer)
        if self._requested == peer:
            self._requested = None

    def before_round(self) -> Operation:
        # Once all ranks have entered a round, no pair is half averaged: nothing is lost or counted twice in the mean.
        yield from self._group.wait_until(lambda: self._requested is None)

    def values(self) -> Tensor:
        return self._values

    def leave(self) -> None:
        return None  # Requests of others are answered all the same, by the transport's thread.

    def join(self) -> None:
        self._context.wait(self._catch_up())
        self._model.write_model(self._context.base)

    def _catch_up(self) -> Operation:
        self._copy_values()
        yield from ()
