"""Peers that tell each other what their steps have changed, without a server and without waiting (Strom 2015)."""

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tutti.errors import PacketError
from tutti.replica import Replica
from tutti.strategies.decentralised.averaging_rounds import Outcome
from tutti.strategies.decentralised.exchange import PeerExchange
from tutti.strategies.decentralised.packets import Packets
from tutti.strategies.decentralised.routing import Routes
from tutti.strategies.decentralised.wire import Head, Kind
from tutti.transports import Transport
from tutti.transports.base import Operation

if TYPE_CHECKING:
    from tutti.strategies.decentralised.strategies import PeerUpdates


@dataclass
class _Heard:
    """What is known of another's updates."""

    applied: int = 0
    """All up to this one are in this rank's parameters."""
    told: int = 0
    """Up to which it knows that."""
    queued: int = 0
    """All up to this one have come, and those `early`."""
    has_mine: int = 0
    """It has said that it applied all of this rank's up to this one."""


class PeerUpdatesExchange(PeerExchange):
    """Computes with whatever has come, and tells everybody what that has changed.

    A rank is at most `inbox` updates ahead of what every other has applied. While it waits for one it goes on applying
    what comes, so that no two wait for each other.
    """

    def __init__(self, replica: Replica, transport: Transport, strategy: "PeerUpdates") -> None:
        compressed = strategy.codec is not None
        super().__init__(replica, transport, "peers", strategy.exact_below if compressed else 0)
        self._inbox_size = strategy.inbox
        self._packets = Packets(self.images, strategy.codec, self._me)
        self._routes = Routes(strategy.graph, transport.size)
        self._number = 0
        self._peers = {peer: _Heard() for peer in range(transport.size) if peer != self._me}
        self._early: set[tuple[int, int]] = set()
        self._inbox: deque[tuple[int, Tensor | None]] = deque()
        self._kept: deque[tuple[Head, Tensor]] = deque()
        """What this rank has told that not all have applied."""
        self._open = False
        """Whether training waits, so that what comes is applied at once."""
        self._staleness: Counter[int] = Counter()
        self._begin()

    @property
    def _clock(self) -> int:
        return self._number

    def metrics(self) -> dict[str, Any]:
        """`staleness[k]` counts this rank's updates that were computed while k updates of other ranks arrived."""
        return {"staleness": dict(sorted(self._staleness.items()))}

    # Steps

    def _step(self) -> None:
        if not self.company.others:
            self.images.read(self.base)
            return
        message = self._packets.encode(self._change())
        self._packets.add(message, self.base)
        self._wait(self._publish(message))
        self.images.write(self.base)

    def _change(self) -> Tensor:
        """What this rank has changed since the last exchange; of running statistics, its part of a mean."""
        change = self.images.change(self.base)
        share = 1 / len(self.company.living)
        for bucket, part in zip(self.images.buckets, self.images.parts(change), strict=False):
            if not bucket.of_parameters:
                part.mul_(share)
        return change

    def _publish(self, message: Tensor) -> Operation:
        self._staleness[len(self._inbox)] += 1
        self._open = True
        self._apply_all()
        if self.company.any_lost:
            for peer in sorted(self.company.others):
                if self._behind(peer):
                    self._make_up(peer)
        yield from self.company.until(lambda: not any(self._behind(peer) for peer in self.company.others))
        self._number += 1
        head = Head(Kind.UPDATE, self._number, self._me, num_bytes=message.nbytes)
        if not self._routes.direct:
            self._kept.append((head, message))
        for peer in self._routes.children(self._me, self._me, self.company.living):
            self.company.tell(peer, head, message)
        self.meetings.beat()
        self._open = False

    def _behind(self, peer: int) -> bool:
        """Whether a peer has to apply something before it is told more."""
        waited_for = peer in self.company.living and peer not in self.company.away
        return waited_for and self._number - self._peers[peer].has_mine >= self._inbox_size

    def _make_up(self, peer: int) -> None:
        """Tell a peer directly what may have been lost on the way."""
        for head, message in self._kept:
            if head.number > self._peers[peer].has_mine:
                self.company.tell(peer, head, message)

    # What others say

    def hear(self, peer: int, head: Head, payload: Tensor | None) -> None:
        match head.kind:
            case Kind.UPDATE:
                self._take(head, payload)
            case Kind.TAKEN:
                self._peers[peer].has_mine = max(self._peers[peer].has_mine, head.number)
                self._forget()
            case _:
                self.meetings.hear(peer, head, payload)

    def _take(self, head: Head, payload: Tensor | None) -> None:
        """Pass an update on, and keep it to be applied; unless it has come before."""
        origin, number = head.origin, head.number
        about = self._peers.get(origin)
        if about is None or number <= about.queued or (origin, number) in self._early:
            return
        self._early.add((origin, number))
        while (origin, about.queued + 1) in self._early:
            about.queued += 1
            self._early.discard((origin, about.queued))
        self.company.clocks[origin] = max(self.company.clocks[origin], number)
        for child in self._routes.children(self._me, origin, self.company.living):
            self.company.tell(child, head, payload)
        self._inbox.append((origin, payload))
        if self._open:
            self._apply_all()

    def _apply_all(self) -> None:
        while self._inbox:
            origin, payload = self._inbox.popleft()
            try:
                if payload is not None:
                    self._packets.add(payload, self.base)
            except PacketError as error:
                self.company.lose(origin, f"it was dropped, having sent {error}")
        for origin, about in self._peers.items():
            about.applied = about.queued
            if about.applied - about.told >= max(1, self._inbox_size // 2):
                self._acknowledge(origin)

    def _acknowledge(self, origin: int) -> None:
        about = self._peers[origin]
        about.told = about.applied
        self.company.tell(origin, Head(Kind.TAKEN, about.applied))

    def _forget(self) -> None:
        """Let go of what everybody has."""
        least = min((self._peers[peer].has_mine for peer in self.company.others), default=self._number)
        while self._kept and self._kept[0][0].number <= least:
            self._kept.popleft()

    def lost(self, peer: int) -> None:
        super().lost(peer)
        if self.company.any_lost:  # Else it has left in peace, when everybody had everything.
            for other in sorted(self.company.others):
                self._make_up(other)
        self._forget()

    # Meetings

    def _before_meeting(self) -> Operation:
        self._open = True
        self._apply_all()
        if self.company.any_lost:
            for peer in sorted(self.company.others):
                self._make_up(peer)
        yield from ()

    def _ready(self) -> bool:
        """Whether all updates of those who have come are here, too."""
        return all(self._peers[peer].applied >= self.company.clocks[peer] for peer in self.company.others)

    def _met(self, outcome: Outcome) -> None:
        self._open = False  # Training goes on.
        if outcome.value is not None and not self.images.sizes_only:  # Updates add up in another order on each rank.
            self.base.copy_(outcome.value[: self.images.num_bytes])

    def leave(self) -> None:
        self._away = True
        self._wait(self._go())

    def _go(self) -> Operation:
        self._open = True  # What comes is applied all the same, so that nobody waits.
        self._apply_all()
        self.company.tell_all(Head(Kind.AWAY))
        yield from ()

    def join(self) -> None:
        super().join()
        self._wait(self._come_back())
        self.images.write(self.base)

    def _come_back(self) -> Operation:
        self._open = False
        self._apply_all()
        for peer in sorted(self.company.others):
            self._acknowledge(peer)
        self.company.tell_all(Head(Kind.BACK))
        yield from ()
