"""Gossip in pairs, at any time: a rank that meets another half-way waits for nobody (Lian et al. 2018)."""

from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tutti.errors import PacketError
from tutti.replica import Replica
from tutti.strategies.decentralised.exchange import PeerExchange
from tutti.strategies.decentralised.graphs import sized
from tutti.strategies.decentralised.routing import both_ways
from tutti.strategies.decentralised.wire import Head, Kind
from tutti.transports import Transport
from tutti.transports.base import Operation

if TYPE_CHECKING:
    from tutti.strategies.decentralised.strategies import Gossip


class AsyncGossip(PeerExchange):
    """Adds what its steps change to values that others may change meanwhile, and computes with a copy of them.

    With one request under way at most, it sends its values to a neighbour, who comes half-way to meet it and says how
    far that was: then it comes as far. So the sum over ranks stays what it is, whatever happens between.
    """

    def __init__(self, replica: Replica, transport: Transport, strategy: "Gossip") -> None:
        super().__init__(replica, transport, "gossip")
        self.topology = sized(strategy.graph, transport.size)
        self._graph = both_ways(self.topology)
        self._values = self.images.copy(self.base)
        self._asked: int | None = None
        self._at = 0
        self._random = Random(self._me)
        self._begin()

    @property
    def _clock(self) -> int:
        return self._at

    def metrics(self) -> dict[str, Any]:
        return {"spectral_gap": self.topology.over(sorted(self.company.living)).spectral_gap}

    def _step(self) -> None:
        self._wait(self._contribute(self.images.change(self.base)))
        self.images.write(self.base)

    def _contribute(self, change: Tensor) -> Operation:
        self._add(change)
        if not self.images.sizes_only:
            self.base.copy_(self._values)
        self._at += 1
        near = [peer for peer in self._graph.neighbours(self._me) if peer in self.company.living]
        if self._asked is None and near:
            self._asked = self._random.choice(near)
            values = self.images.copy(self._values)
            self.company.tell(self._asked, Head(Kind.ASK, clock=self._at, num_bytes=values.nbytes), values)
        self.meetings.beat()
        yield from ()

    @torch.no_grad()
    def _add(self, change: Tensor, factor: float = 1.0) -> None:
        for value, part in zip(self.images.parts(self._values), self.images.parts(change), strict=True):
            value.add_(part, alpha=factor)

    def hear(self, peer: int, head: Head, payload: Tensor | None) -> None:
        if head.kind not in (Kind.ASK, Kind.ANSWER):
            self.meetings.hear(peer, head, payload)
            return
        if payload is None or payload.nbytes != self.images.num_bytes:
            raise PacketError(f"values of {head.num_bytes} bytes, wanted {self.images.num_bytes}")
        self.company.clocks[peer] = head.clock
        if head.kind == Kind.ASK:
            self._come_half_way(payload)
            self.company.tell(peer, Head(Kind.ANSWER, clock=self._at, num_bytes=payload.nbytes), payload)
        elif peer == self._asked:
            self._add(payload, -1.0)
            self._asked = None

    @torch.no_grad()
    def _come_half_way(self, theirs: Tensor) -> None:
        """Go half of the way to `theirs`, which is that way afterwards."""
        for value, way in zip(self.images.parts(self._values), self.images.parts(theirs), strict=True):
            way.sub_(value).mul_(0.5)
            value.add_(way)

    def lost(self, peer: int) -> None:
        super().lost(peer)
        if self._asked == peer:
            self._asked = None

    # Meetings

    def _before_meeting(self) -> Operation:
        yield from self.company.until(lambda: self._asked is None)

    def _current(self) -> Tensor:
        return self._values

    def leave(self) -> None:
        self._away = True  # Others are answered all the same.

    def join(self) -> None:
        super().join()
        self._wait(self._catch_up())
        self.images.write(self.base)

    def _catch_up(self) -> Operation:
        if not self.images.sizes_only:
            self.base.copy_(self._values)
        yield from ()
