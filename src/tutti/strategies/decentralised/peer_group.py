"""Peers of a rank: sending to them, receiving from them, and going on without those that are lost.

How it works
------------
Everything here runs as generators (`Operation`) in one thread of the transport, or in the simulator's engine, so
nothing has a lock. For every peer, one generator receives its messages (`_receive_messages`) and, while there is
something to send, one sends (`_send_queued`). The training thread never changes this state directly: it hands in a
generator by `wait` and blocks until that is done.

A generator that needs something of other peers yields `wait_until(condition)`. Every message, loss, stop or failure
calls `notify`, which wakes it to look again. Only one generator at a time may wait so, which is the one of the training
thread.

How a wait ends: the peers send what the condition needs; or they are lost, because conditions ask only for living
peers; or all is over (`is_over`): a rank has a loss that is not finite, or this rank has failed.

A peer is lost when receiving from it fails, when it sends a malformed message, or when another peer says so. `lose`
removes it, and sends `LOST` to all others and to the lost peer itself: if that is alive, it must not train alone. All
ranks that are left therefore come to the same set `alive`, though not at the same moment.
"""

import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from tutti.collectives.compressed.messages import new_message
from tutti.errors import NonFiniteLoss, PacketError, RankLost, ReplicaMismatch
from tutti.strategies.decentralised.wire import HEADER_TAG, PAYLOAD_TAG, PeerMessageHeader, PeerMessageKind
from tutti.transports import Transport
from tutti.transports.base import Operation, Signal

_log = logging.getLogger("tutti")


class PeerListener(Protocol):
    """Handles messages and losses of peers, in the transport's thread."""

    def receive(self, peer: int, header: PeerMessageHeader, payload: Tensor | None) -> None:
        """Handle a message of a peer. Raises `PacketError` if it is malformed: the peer is then lost."""
        ...

    def peer_lost(self, peer: int) -> None:
        """Go on without a peer that has left or is lost."""
        ...


class PeerGroup:
    """All ranks that are alive, this one among them, and the connections to them."""

    def __init__(self, transport: Transport, like: Tensor, max_bytes: int) -> None:
        """Make a group of all ranks of a transport.

        Args:
            transport: a channel of the group's own.
            like: says whether payloads are values or sizes only.
            max_bytes: the most bytes that a payload may have.
        """
        self.transport, self.rank = transport, transport.rank
        # Frozen sets: the training thread reads them while the transport's thread replaces them.
        self.alive = frozenset(range(transport.size))
        self.away: frozenset[int] = frozenset()
        """Living peers that are on leave: they are not waited for."""
        self.clocks = [0] * transport.size
        """Number of steps of each rank, as known here."""
        self.num_lost = 0
        """Number of peers that were lost; those that left after `DISCONNECT` do not count."""
        self._like, self._max_bytes = like, max_bytes
        self._stopped_by: int | None = None
        self._failure: Exception | None = None
        self._outboxes: dict[int, deque[tuple[PeerMessageHeader, Tensor | None]]] = {}
        self._changed: Signal | None = None
        """Set to wake the generator that waits in `wait_until`."""

    def start(self, listener: PeerListener) -> None:
        """Receive messages of all peers from now on, and hand them to `listener`."""
        self._listener = listener
        for peer in sorted(self.others):
            # Nobody waits for it: it runs until the peer is gone, and reports by `lose` or `fail`.
            self.transport.spawn(self._receive_messages(peer))

    @property
    def others(self) -> frozenset[int]:
        """Living ranks except this one."""
        return self.alive - {self.rank}

    @property
    def leader(self) -> int:
        """The lowest living rank."""
        return min(self.alive)

    # Waiting

    def wait(self, operation: Operation, num_steps: int = 0) -> None:
        """Run a generator and wait for it, from the training thread; then `check`."""
        # The deadline counts from the last progress: every message that wakes the generator moves it on.
        self.transport.spawn(operation).wait()
        self.check(num_steps)

    def check(self, num_steps: int) -> None:
        """Raise `NonFiniteLoss` if a rank has asked all to stop, or the error with which this rank has failed."""
        if self._stopped_by is not None:
            self.transport.spawn(self._flush()).wait()  # Peers must receive STOP before this rank closes.
            world_ranks = self.transport.world_ranks
            raise NonFiniteLoss(world_ranks[self.rank], [world_ranks[self._stopped_by]], num_steps)
        if self._failure is not None:
            raise self._failure

    @property
    def is_over(self) -> bool:
        """Whether training ends here, so that nothing is worth waiting for."""
        return self._stopped_by is not None or self._failure is not None

    def wait_until(self, condition: Callable[[], bool]) -> Operation:
        """Wait until a condition on the state of this rank holds, or all is over."""
        while not (condition() or self.is_over):
            self._changed = self.transport.signal()
            yield self._changed

    def notify(self) -> None:
        """Wake the generator that waits, to look at its condition again."""
        if self._changed is not None:
            signal, self._changed = self._changed, None
            signal.set()

    def stop(self, origin: int) -> None:
        """Make all ranks stop, because the loss on rank `origin` is not finite.

        Every rank that receives this passes it on: a peer might see `origin` gone before it learns why.
        """
        if self._stopped_by is None:
            self._stopped_by = origin
            self.send_to_all(PeerMessageHeader(PeerMessageKind.STOP, origin=origin))
            self.notify()

    def fail(self, error: Exception) -> None:
        """Make this rank raise an error in its training thread; the first one counts."""
        # Raised by `check`: this runs in the transport's thread, where nobody would see it.
        self._failure = self._failure or error
        self.notify()

    # Sending

    def send(self, peer: int, header: PeerMessageHeader, payload: Tensor | None = None) -> None:
        """Queue a message for a living peer. The payload may not change until `is_flushed`."""
        if peer not in self.others:
            return
        outbox = self._outboxes.setdefault(peer, deque())
        outbox.append((header, payload))
        if len(outbox) == 1:  # Otherwise a generator is sending already.
            self.transport.spawn(self._send_queued(peer, outbox))

    def send_to_all(self, header: PeerMessageHeader, payload: Tensor | None = None) -> None:
        """Queue a message for all living peers."""
        for peer in sorted(self.others):
            self.send(peer, header, payload)

    def is_flushed(self) -> bool:
        """Whether everything that was queued for living peers is sent."""
        return not any(self._outboxes.get(peer) for peer in self.others)

    def _flush(self) -> Operation:
        """Wait until everything that was queued for living peers is sent."""
        # Not `wait_until`, which returns at once when all is over, as it is here.
        while not self.is_flushed():
            self._changed = self.transport.signal()
            yield self._changed

    def _send_queued(self, peer: int, outbox: deque[tuple[PeerMessageHeader, Tensor | None]]) -> Operation:
        """Send what is in a peer's outbox until that is empty."""
        try:
            while outbox:
                # Left in the outbox until it is sent: a non-empty outbox tells `send` that this generator runs.
                header, payload = outbox[0]
                # Both are under way at once: the payload need not wait until the header is sent.
                sends = [self.transport.isend(header.pack(), peer, HEADER_TAG)]
                if payload is not None:
                    sends.append(self.transport.isend(payload, peer, PAYLOAD_TAG))
                yield from sends
                if outbox:  # It may have been cleared meanwhile.
                    outbox.popleft()
        except RankLost:
            # Not yet a loss: the peer's last messages may still be under way. `_receive_messages` decides.
            outbox.clear()
        except Exception as error:
            self.fail(error)
        self.notify()

    # Receiving

    def _receive_messages(self, peer: int) -> Operation:
        """Receive and handle a peer's messages until it is gone."""
        try:
            while peer in self.alive:
                message = PeerMessageHeader.empty()
                yield self.transport.irecv(message, peer, HEADER_TAG)
                header = PeerMessageHeader.parse(message)
                payload = None
                if header.num_bytes:
                    # Checked before anything is allocated: the header may be malformed.
                    if not 0 < header.num_bytes <= self._max_bytes:
                        raise PacketError(f"a message of {header.num_bytes} bytes, wanted at most {self._max_bytes}")
                    payload = new_message(header.num_bytes, self._like)
                    yield self.transport.irecv(payload, peer, PAYLOAD_TAG)
                # It may have been lost, by another peer's word, while its payload arrived.
                if peer in self.alive:
                    self._handle(peer, header, payload)
                del payload  # Not kept while the next message is awaited.
        except RankLost as loss:
            self.lose(peer, loss.gone.get(self.transport.world_ranks[peer], "it answers no more"))
        except (PacketError, ReplicaMismatch) as error:
            self.lose(peer, f"it was dropped, having sent {error}")
        except Exception as error:
            self.fail(error)

    def _handle(self, peer: int, header: PeerMessageHeader, payload: Tensor | None) -> None:
        """Act on a message about membership, or hand it to the listener; then wake the generator that waits."""
        match header.kind:
            case PeerMessageKind.STOP:
                self.stop(header.origin)
            case PeerMessageKind.LEAVE:
                self.away |= {peer}
            case PeerMessageKind.JOIN:
                self.away -= {peer}
            case PeerMessageKind.LOST if header.origin == self.rank:
                me, sender = self.transport.world_rank, self.transport.world_ranks[peer]
                self.fail(RankLost(f"rank {me}: the others have gone on without this rank, says rank {sender}."))
            case PeerMessageKind.LOST:
                self.lose(header.origin, f"rank {self.transport.world_ranks[peer]} has lost it")
            # It has finished: removed like a lost peer, but without a warning and without being counted as lost.
            case PeerMessageKind.DISCONNECT:
                self._remove(peer)
            case PeerMessageKind.KEEP_ALIVE:
                pass  # Its arrival has moved the deadline of the wait on.
            case _:
                self._listener.receive(peer, header, payload)
        self.notify()

    def lose(self, peer: int, reason: str) -> None:
        """Go on without a peer, and make the others do so.

        The lost peer gets the message too: if it is alive after all, it must not train alone.
        """
        if peer not in self.alive or peer == self.rank:
            return
        self.num_lost += 1
        self.send_to_all(PeerMessageHeader(PeerMessageKind.LOST, origin=peer))  # Before the removal: to it as well.
        self._remove(peer)
        if self.rank == self.leader:  # All ranks see the loss; one logs it.
            _log.warning(
                "rank %d: rank %d is gone at clock %d (%s); the other %d go on",
                *(self.transport.world_rank, self.transport.world_ranks[peer], self.clocks[peer]),
                *(reason, len(self.alive)),
            )

    def _remove(self, peer: int) -> None:
        """Take a peer out of the group, and let the listener and the waiting generator know."""
        self.alive -= {peer}  # A new frozen set, which a reader in the training thread sees as a whole.
        self.away -= {peer}
        self._listener.peer_lost(peer)
        self.notify()
