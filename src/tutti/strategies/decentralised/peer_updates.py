"""Peers' updates: every rank sends what its steps change to all others, without a server (Strom 2015).

How it works
------------
After each of its steps a rank compresses the change, adds the compressed change to its own parameters (`base`), and
sends it as an update with a number. Other ranks apply it when they come to it. So every rank ends with the sum of all
updates; only the order differs.

The transport's thread receives updates and passes them on along the routes. They are queued while the training thread
computes, and applied at its next step. While training waits, on leave, or in a round (`_applies_at_once`), they are
applied at once, so that no two ranks wait for each other.

Flow control: a rank is at most `inbox` updates ahead of what every living peer has applied. It waits in `_publish`
until peers have acknowledged enough. A peer acknowledges after every `inbox` / 2 updates that it applies. The wait for
a peer ends by its acknowledgement, or when it is lost or on leave.

Losses: along a graph a lost rank may have held updates that it had not passed on. Every rank keeps its own updates
until all living peers have acknowledged them, and after a loss sends them again, directly (`SentUpdates.resend`).
Duplicates are dropped by their numbers. In an averaging round a rank is ready when all updates that the others have
sent are applied: then nothing is under way, and all ranks take the mean, which removes differences of rounding.
"""

from collections import Counter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tutti.errors import PacketError
from tutti.strategies.decentralised.algorithm import PeerAlgorithm, PeerContext
from tutti.strategies.decentralised.averaging_rounds import RoundResult
from tutti.strategies.decentralised.packets import UpdatePackets
from tutti.strategies.decentralised.routing import UpdateRoutes
from tutti.strategies.decentralised.update_queues import SentUpdates, UpdateInbox
from tutti.strategies.decentralised.wire import PeerMessageHeader, PeerMessageKind
from tutti.strategies.resumable import KnownSteps
from tutti.transports.base import Operation

if TYPE_CHECKING:
    from tutti.strategies.decentralised.strategies import PeerUpdates


class PeerUpdatesAlgorithm(PeerAlgorithm):
    """Sends this rank's updates to all others, and applies theirs between its steps."""

    adds_changes = True
    packets: UpdatePackets

    def __init__(self, context: PeerContext, strategy: "PeerUpdates") -> None:
        super().__init__(context)
        size = context.group.transport.size
        self._inbox_size = strategy.inbox
        self.packets = UpdatePackets(self._model, strategy.codec, context.rank)
        self._routes = UpdateRoutes(strategy.graph, size)
        peers = [peer for peer in range(size) if peer != context.rank]
        self._inbox = UpdateInbox(peers)
        self._sent = SentUpdates(context.group, peers)
        self._applies_at_once = False
        """Whether training waits, so that updates are applied as they arrive."""
        self._staleness: Counter[int] = Counter()

    @property
    def clock(self) -> int:
        return self._sent.last_number

    def metrics(self) -> dict[str, Any]:
        """`staleness[k]` counts this rank's updates that were computed while k updates of other ranks arrived."""
        return {"staleness": dict(sorted(self._staleness.items()))}

    # Steps

    def exchange_step(self) -> None:
        if not self._group.others:
            # The last rank left: it trains alone, and its steps are exact.
            self._model.read_model(self._context.base)
            return
        message = self.packets.encode(self._change())
        # What was compressed, not what was computed: so this rank applies the same as all others.
        self.packets.add(message, self._context.base)
        self._context.wait(self._publish(message))
        self._model.write_model(self._context.base)

    def _change(self) -> Tensor:
        """Return what this rank has changed since the last exchange; of running statistics, its part of the mean."""
        change = self._model.change_since(self._context.base)
        # Updates of all ranks add up. That is meant for parameters; statistics must become the mean.
        fraction = 1 / len(self._group.alive)
        # Not strict: in a dry run there are no views.
        for bucket, values in zip(self._model.buckets, self._model.bucket_views(change), strict=False):
            if not bucket.of_parameters:
                values.mul_(fraction)
        return change

    def _publish(self, message: Tensor) -> Operation:
        """Apply what has arrived, wait until no peer is too far behind, and send an update."""
        self._staleness[len(self._inbox)] += 1
        # Until this rank computes again. Otherwise two ranks that wait could wait for each other's acknowledgements.
        self._applies_at_once = True
        self._apply_all()
        # A peer may lack updates that a lost rank did not pass on, and would then never acknowledge: send them again.
        if self._group.num_lost:
            for peer in sorted(self._group.others):
                if self._sent.is_behind(peer, self._inbox_size):
                    self._sent.resend(peer)
        yield from self._group.wait_until(
            lambda: not any(self._sent.is_behind(peer, self._inbox_size) for peer in self._group.others)
        )
        header = self._sent.next_header(message)
        if not self._routes.is_direct:  # Sent directly, nothing can be lost with a rank in between.
            self._sent.keep(header, message)
        rank = self._context.rank
        for peer in self._routes.children(rank, rank, self._group.alive):
            self._group.send(peer, header, message)
        self._rounds.send_keep_alives()
        self._applies_at_once = False

    # Messages

    def receive(self, peer: int, header: PeerMessageHeader, payload: Tensor | None) -> None:
        match header.kind:
            case PeerMessageKind.UPDATE:
                self._receive_update(header, payload)
            case PeerMessageKind.ACKNOWLEDGE:
                self._sent.acknowledge(peer, header.number)
            case _:
                self._rounds.receive(peer, header, payload)

    def _receive_update(self, header: PeerMessageHeader, payload: Tensor | None) -> None:
        """Pass a new update on, and queue it to be applied."""
        origin = header.origin
        # Known already, by another path or sent again: it was passed on then, so that nothing circulates for ever.
        if not self._inbox.accept(origin, header.number):
            return
        self._group.clocks[origin] = max(self._group.clocks[origin], header.number)
        # Passed on at once, applied later: the update must not wait for this rank's step.
        for child in self._routes.children(self._context.rank, origin, self._group.alive):
            self._group.send(child, header, payload)
        self._inbox.append(origin, payload)
        if self._applies_at_once:
            self._apply_all()

    def _apply_all(self) -> None:
        """Apply every queued update, and acknowledge to each origin when enough of its updates are applied."""
        self._inbox.apply_all(self._apply)
        self.known_steps = {rank: KnownSteps(*numbers) for rank, numbers in self._inbox.applied.items()}
        for origin in self._inbox.unacknowledged(at_least=max(1, self._inbox_size // 2)):
            self._acknowledge(origin)

    def _apply(self, origin: int, message: Tensor) -> None:
        """Add an update to `base`; a malformed one makes its origin lost."""
        try:
            self.packets.add(message, self._context.base)
        except PacketError as error:
            # Blamed on the origin, not on the peer that passed it on: those do not look into packets.
            self._group.lose(origin, f"it was dropped, having sent {error}")

    def _acknowledge(self, origin: int) -> None:
        """Send a rank the number up to which its updates are applied here."""
        header = PeerMessageHeader(PeerMessageKind.ACKNOWLEDGE, self._inbox.acknowledge(origin))
        self._group.send(origin, header)

    def peer_lost(self, peer: int) -> None:
        super().peer_lost(peer)
        if self._group.num_lost:  # Otherwise it has finished, and all updates were applied before.
            self._sent.resend_to_all()
        # The lost peer may have been the last that had not acknowledged some of them.
        self._sent.drop_acknowledged()

    # Averaging rounds, leave and join

    def before_round(self) -> Operation:
        # From here on this rank computes nothing, and the others wait for what it applies.
        self._applies_at_once = True
        self._apply_all()
        if self._group.num_lost:
            self._sent.resend_to_all()
        yield from ()

    def is_ready(self) -> bool:
        """Whether all updates that the others had sent when they entered the round are applied."""
        # A peer reports its clock as it enters, behind its last update on the same connection; updates that come
        # later, or along other paths, are waited for.
        return all(self._inbox.num_applied(peer) >= self._group.clocks[peer] for peer in self._group.others)

    def round_finished(self, result: RoundResult) -> None:
        self._applies_at_once = False  # Training goes on.
        if result.value is not None and not self._model.sizes_only:
            # Each rank has added updates in another order: the mean makes all ranks equal to the bit.
            self._context.base.copy_(result.value[: self._model.num_bytes])

    def set_waiting(self, waiting: bool) -> None:
        def apply_at_once() -> Operation:
            # Senders wait for acknowledgements of updates that are applied, and this rank computes nothing meanwhile.
            self._applies_at_once = waiting
            self._apply_all()
            yield from ()

        self._context.wait(apply_at_once())
        # Here, in the training thread, which alone may change the model.
        self._model.write_model(self._context.base)

    def leave(self) -> None:
        self._context.wait(self._leave())

    def _leave(self) -> Operation:
        self._applies_at_once = True
        self._apply_all()
        self._group.send_to_all(PeerMessageHeader(PeerMessageKind.LEAVE))
        yield from ()

    def join(self) -> None:
        self._context.wait(self._join())
        self._model.write_model(self._context.base)

    def _join(self) -> Operation:
        self._applies_at_once = False
        self._apply_all()
        # Peers wait for this rank again from now on: they must know what it has applied while it was away.
        for peer in sorted(self._group.others):
            self._acknowledge(peer)
        self._group.send_to_all(PeerMessageHeader(PeerMessageKind.JOIN))
        yield from ()
