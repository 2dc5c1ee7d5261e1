"""Gossip in step: neighbours mix their values while they compute the next gradient (Lian et al. 2017)."""

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tutti.errors import PacketError
from tutti.replica import Replica
from tutti.strategies.decentralised.averaging_rounds import Outcome, Purpose
from tutti.strategies.decentralised.exchange import PeerExchange
from tutti.strategies.decentralised.graphs import Graph, ring, sized
from tutti.strategies.decentralised.wire import Head, Kind
from tutti.transports import Transport
from tutti.transports.base import Operation

if TYPE_CHECKING:
    from tutti.strategies.decentralised.strategies import Gossip

_log = logging.getLogger("tutti")


class SyncGossip(PeerExchange):
    """At clock t: x_i(t+1) = Σ_j W_ij x_j(t) + what the optimiser's step has changed here.

    Where W is of a directed graph, a weight is mixed like the values, and the model is the values over the weight. A
    neighbour that is lost, away or in a meeting is a hole: its part is taken of this rank's own values. When one is
    lost, everybody meets, and the graph is made anew over those who are left.
    """

    def __init__(self, replica: Replica, transport: Transport, strategy: "Gossip") -> None:
        super().__init__(replica, transport, "gossip")
        self._whole = self.topology = sized(strategy.graph, transport.size)
        self._group = tuple(range(transport.size))
        self._since = self._at = 0
        """The meeting since which clocks are counted together, and the clock."""
        self._values = self.images.copy(self.base)
        self._weight = 1.0
        self._heard: dict[tuple[int, int, int], tuple[Tensor | None, float]] = {}
        """By meeting, clock and rank."""
        self._begin()
        self._wait(self._send_out())

    @property
    def _clock(self) -> int:
        return self._at

    def metrics(self) -> dict[str, Any]:
        return {"spectral_gap": self.topology.spectral_gap}

    def _step(self) -> None:
        self._wait(self._mix(self.images.change(self.base)))
        if self._regroup_due():
            self.meet(Purpose.REGROUP)
        self.images.write(self.base)

    def _regroup_due(self) -> bool:
        return self.meetings.regroup_called or not self.company.living.issuperset(self._group)

    def _mix(self, change: Tensor) -> Operation:
        sources = self.topology.sources(self._group.index(self._me), self._at)
        parts = {self._group[place]: part for place, part in sources.items()}
        own = parts.pop(self._me, 0.0)
        yield from self.company.until(lambda: all(self._settled(peer) for peer in parts))
        here = {peer: self._heard.get((self._since, self._at, peer)) for peer in parts}
        own += sum(part for peer, part in parts.items() if here[peer] is None)
        taken = [(parts[peer], *got) for peer, got in here.items() if got is not None]
        self._combine(own, taken, change)
        self._at += 1
        self._heard = {key: got for key, got in self._heard.items() if key[:2] >= (self._since, self._at)}
        self.meetings.beat()
        if not self._regroup_due():
            yield from self._send_out()

    def _settled(self, peer: int) -> bool:
        """Whether a neighbour's values are here, or nobody should wait for them."""
        return self._absent(peer) or (self._since, self._at, peer) in self._heard

    def _absent(self, peer: int) -> bool:
        return peer not in self.company.living or peer in self.company.away or self.meetings.waits(peer)

    @torch.no_grad()
    def _combine(self, own: float, taken: list[tuple[float, Tensor | None, float]], change: Tensor) -> None:
        others = [(part, self.images.parts(values)) for part, values, _ in taken if values is not None]
        mine, bases = self.images.parts(self._values), self.images.parts(self.base)
        self._weight = own * self._weight + sum(part * weight for part, _, weight in taken)
        for number, (value, changed) in enumerate(zip(mine, self.images.parts(change), strict=True)):
            value.mul_(own)
            for part, theirs in others:
                value.add_(theirs[number], alpha=part)
            value.add_(changed)
            bases[number].copy_(value / self._weight if self.topology.directed else value)

    def _send_out(self) -> Operation:
        targets = self.topology.targets(self._group.index(self._me), self._at)
        if targets:
            values = self.images.copy(self._values)
            head = Head(Kind.VALUES, self._since, self._me, self._at, values.nbytes, self._weight)
            for place in targets:
                if not self._absent(self._group[place]):
                    self.company.tell(self._group[place], head, values)
        yield from ()

    def hear(self, peer: int, head: Head, payload: Tensor | None) -> None:
        if head.kind != Kind.VALUES:
            self.meetings.hear(peer, head, payload)
            return
        if payload is None or payload.nbytes != self.images.num_bytes:
            raise PacketError(f"values of {head.num_bytes} bytes, wanted {self.images.num_bytes}")
        self.company.clocks[peer] = head.clock
        if head.number == self._since and (self._away or self.meetings.within):
            return  # Others may be far ahead when this rank takes part again, and say anew what they have.
        if (head.number, head.clock) >= (self._since, self._at):
            self._heard[head.number, head.clock, peer] = payload, head.weight

    # Meetings

    def _met(self, outcome: Outcome) -> None:
        if self._me not in outcome.group:
            return
        if outcome.group != self._group:  # Those who are lost took weight with them: it begins anew.
            for value in self.images.parts(self._values):
                value.div_(self._weight)
            self._weight = 1.0
        self._since, self._at, self._group = outcome.number, outcome.clock, outcome.group
        self.topology = self._whole.over(outcome.group)
        if isinstance(self.topology, Graph) and len(self.topology.parts) > 1:
            if self._me == self.company.leader:
                _log.warning("rank %d: without those who are lost the graph falls apart; the rest are a ring", self._me)
            self.topology = ring(len(outcome.group))
        self._heard = {key: got for key, got in self._heard.items() if key[:2] >= (self._since, self._at)}
        for _ in self._send_out():
            pass

    def join(self) -> None:
        super().join()
        self._wait(self._say(Kind.BACK))
        self.meet(Purpose.REGROUP)
