"""Queues of peers' updates: received ones that are not applied yet, and sent ones that not all peers have applied."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from tutti.strategies.decentralised.wire import PeerMessageHeader


class UpdateInbox:
    """Updates of other ranks, each taken once, in whatever order and however often they arrive.

    Along a graph, an update may arrive by several ways, and again when it is resent after a loss.
    """

    def __init__(self, peers: Iterable[int]) -> None:
        self._queue: deque[tuple[int, Tensor | None]] = deque()
        self._in_order = dict.fromkeys(peers, 0)
        """By origin: all updates up to this number have arrived."""
        self._out_of_order: set[tuple[int, int]] = set()
        """Origin and number of updates that have arrived before an earlier one."""
        self._applied = dict(self._in_order)
        self._acknowledged = dict(self._in_order)

    def __len__(self) -> int:
        return len(self._queue)

    def accept(self, origin: int, number: int) -> bool:
        """Return whether an update is new, and remember that it has arrived."""
        in_order = self._in_order.get(origin)
        if in_order is None or number <= in_order or (origin, number) in self._out_of_order:
            return False
        self._out_of_order.add((origin, number))
        while (origin, self._in_order[origin] + 1) in self._out_of_order:
            self._in_order[origin] += 1
            self._out_of_order.discard((origin, self._in_order[origin]))
        return True

    def append(self, origin: int, message: Tensor | None) -> None:
        """Queue an update for `apply_all`."""
        self._queue.append((origin, message))

    def apply_all(self, apply: Callable[[int, Tensor], None]) -> None:
        """Call `apply` with the origin and message of every queued update."""
        while self._queue:
            origin, message = self._queue.popleft()
            if message is not None:
                apply(origin, message)
        self._applied = dict(self._in_order)

    def num_applied(self, origin: int) -> int:
        """Return the number up to which all updates of a rank are applied."""
        return self._applied[origin]

    def unacknowledged(self, at_least: int) -> list[int]:
        """Return the ranks of which this many updates or more are applied, but not acknowledged."""
        return [rank for rank, number in self._applied.items() if number - self._acknowledged[rank] >= at_least]

    def acknowledge(self, origin: int) -> int:
        """Return the number to acknowledge to a rank, and remember that it was."""
        self._acknowledged[origin] = self._applied[origin]
        return self._applied[origin]


class SentUpdates:
    """This rank's updates, kept until all living peers have acknowledged them, to resend what a loss has cut off."""

    def __init__(self, peers: Iterable[int]) -> None:
        self._kept: deque[tuple[PeerMessageHeader, Tensor]] = deque()
        self._acknowledged = dict.fromkeys(peers, 0)

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, header: PeerMessageHeader, message: Tensor) -> None:
        """Keep an update that was sent."""
        self._kept.append((header, message))

    def acknowledge(self, peer: int, number: int) -> None:
        """Note that a peer has applied all updates up to a number."""
        self._acknowledged[peer] = max(self._acknowledged[peer], number)

    def num_acknowledged(self, peer: int) -> int:
        """Return the number up to which a peer has applied this rank's updates."""
        return self._acknowledged[peer]

    def missing(self, peer: int) -> Iterator[tuple[PeerMessageHeader, Tensor]]:
        """Yield the kept updates that a peer has not acknowledged."""
        for header, message in self._kept:
            if header.number > self._acknowledged[peer]:
                yield header, message

    def drop_acknowledged(self, peers: Iterable[int], last_number: int) -> None:
        """Drop the updates that all of these peers have acknowledged; `last_number` counts if there are none."""
        least = min((self._acknowledged[peer] for peer in peers), default=last_number)
        while self._kept and self._kept[0][0].number <= least:
            self._kept.popleft()
