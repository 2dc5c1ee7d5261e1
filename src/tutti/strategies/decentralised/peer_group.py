"""The peers of a rank: what they say is heard, what they are told is sent, and those who are lost are done without.

Everything here happens in steps beside training, in one thread or in the simulator's engine, so nothing needs a lock:
training hands in steps of its own and waits for them.
"""

import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from tutti.collectives.compressed.messages import new_message
from tutti.errors import NonFiniteLoss, PacketError, RankLost, ReplicaMismatch
from tutti.strategies.decentralised.wire import HEAD, PAYLOAD, Head, Kind
from tutti.transports import Transport
from tutti.transports.base import Operation, Signal

_log = logging.getLogger("tutti")


class Ears(Protocol):
    """Who is told what peers say."""

    def hear(self, peer: int, head: Head, payload: Tensor | None) -> None: ...
    def lost(self, peer: int) -> None: ...


class Company:
    """All ranks that are left, this one among them."""

    def __init__(self, wire: Transport, ears: Ears, like: Tensor, most_bytes: int) -> None:
        """Payloads are made like `like`, and none is larger than `most_bytes`."""
        self.wire, self.me = wire, wire.rank
        self.living = frozenset(range(wire.size))
        self.away: frozenset[int] = frozenset()
        """Who is not to be waited for."""
        self.clocks = [0] * wire.size
        """How far each was when it was last heard of."""
        self.any_lost = False
        self._ears, self._like, self._most_bytes = ears, like, most_bytes
        self._stopped: int | None = None
        self._failure: Exception | None = None
        self._outbox: dict[int, deque[tuple[Head, Tensor | None]]] = {}
        self._changed: Signal | None = None

    def start(self) -> None:
        """Hear what everybody says from now on."""
        for peer in sorted(self.others):
            self.wire.spawn(self._listen(peer))

    @property
    def others(self) -> frozenset[int]:
        return self.living - {self.me}

    @property
    def leader(self) -> int:
        """The first of those who are left."""
        return min(self.living)

    # Waiting

    def wait(self, steps: Operation, num_steps: int = 0) -> None:
        """Take steps and wait for them. Raises if a peer has asked everybody to stop, and if something failed."""
        self.wire.spawn(steps).wait()
        self.check(num_steps)

    def check(self, num_steps: int) -> None:
        if self._stopped is not None:
            self.wire.spawn(self._flush()).wait()
            raise NonFiniteLoss(self.me, [self._stopped], num_steps)
        if self._failure is not None:
            raise self._failure

    @property
    def over(self) -> bool:
        """Whether nothing is worth waiting for any more."""
        return self._stopped is not None or self._failure is not None

    def until(self, condition: Callable[[], bool]) -> Operation:
        """Wait for what others' steps bring about, or for all to be over."""
        while not (condition() or self.over):
            self._changed = self.wire.signal()
            yield self._changed

    def change(self) -> None:
        """Have whoever waits look again."""
        if self._changed is not None:
            signal, self._changed = self._changed, None
            signal.set()

    def stop(self, origin: int) -> None:
        """Have everybody stop, for the loss on that rank is not finite.

        Whoever hears of it tells the others before it goes: they might hear that `origin` is gone before they hear why.
        """
        if self._stopped is None:
            self._stopped = origin
            self.tell_all(Head(Kind.STOP, origin=origin))
            self.change()

    def fail(self, error: Exception) -> None:
        """Have this rank raise that."""
        self._failure = self._failure or error
        self.change()

    # Telling

    def tell(self, peer: int, head: Head, payload: Tensor | None = None) -> None:
        """Have a peer told, after what it was told before. The payload may not change until `flushed`."""
        if peer not in self.others:
            return
        box = self._outbox.setdefault(peer, deque())
        box.append((head, payload))
        if len(box) == 1:
            self.wire.spawn(self._send(peer, box))

    def tell_all(self, head: Head, payload: Tensor | None = None) -> None:
        for peer in sorted(self.others):
            self.tell(peer, head, payload)

    def flushed(self) -> bool:
        """Whether all that was to be told is on its way."""
        return not any(self._outbox.get(peer) for peer in self.others)

    def _flush(self) -> Operation:
        while not self.flushed():
            self._changed = self.wire.signal()
            yield self._changed

    def _send(self, peer: int, box: deque[tuple[Head, Tensor | None]]) -> Operation:
        try:
            while box:
                head, payload = box[0]
                sending = [self.wire.isend(head.pack(), peer, HEAD)]
                if payload is not None:
                    sending.append(self.wire.isend(payload, peer, PAYLOAD))
                yield from sending
                if box:  # Else it was emptied meanwhile.
                    box.popleft()
        except RankLost:
            box.clear()  # What it said last may be still to be heard: whoever listens to it finds out.
        except Exception as error:
            self.fail(error)
        self.change()

    # Hearing

    def _listen(self, peer: int) -> Operation:
        try:
            while peer in self.living:
                message = Head.room()
                yield self.wire.irecv(message, peer, HEAD)
                head = Head.read(message)
                payload = None
                if head.num_bytes:
                    if not 0 < head.num_bytes <= self._most_bytes:
                        raise PacketError(f"a message of {head.num_bytes} bytes, at most {self._most_bytes} can be")
                    payload = new_message(head.num_bytes, self._like)
                    yield self.wire.irecv(payload, peer, PAYLOAD)
                if peer in self.living:
                    self._hear(peer, head, payload)
                del payload
        except RankLost as loss:
            self.lose(peer, loss.gone.get(peer, "it answers no more"))
        except (PacketError, ReplicaMismatch) as error:
            self.lose(peer, f"it was dropped, having sent {error}")
        except Exception as error:
            self.fail(error)

    def _hear(self, peer: int, head: Head, payload: Tensor | None) -> None:
        match head.kind:
            case Kind.STOP:
                self.stop(head.origin)
            case Kind.AWAY:
                self.away |= {peer}
            case Kind.BACK:
                self.away -= {peer}
            case Kind.GONE if head.origin == self.me:
                self.fail(RankLost(f"rank {self.me}: the others have gone on without this rank, says rank {peer}."))
            case Kind.GONE:
                self.lose(head.origin, f"rank {peer} has lost it")
            case Kind.BYE:
                self._part(peer)
            case Kind.BEAT:
                pass
            case _:
                self._ears.hear(peer, head, payload)
        self.change()

    def lose(self, peer: int, why: str) -> None:
        """Go on without a peer, and have the others do so. It is told too: if it lives, it must not go on alone."""
        if peer not in self.living or peer == self.me:
            return
        self.any_lost = True
        self.tell_all(Head(Kind.GONE, origin=peer))
        self._part(peer)
        if self.me == self.leader:  # All see it; one says it.
            _log.warning(
                "rank %d: rank %d is gone at clock %d (%s); the other %d go on",
                *(self.me, peer, self.clocks[peer], why, len(self.living)),
            )

    def _part(self, peer: int) -> None:
        self.living -= {peer}
        self.away -= {peer}
        self._ears.lost(peer)
        self.change()
