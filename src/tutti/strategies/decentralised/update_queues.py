"""Queues of peers' updates: received ones that are not applied yet, and sent ones that not all peers have applied."""

from collections import deque
from collections.abc import Callable, Iterable

from torch import Tensor

from tutti.strategies.decentralised.peer_group import PeerGroup
from tutti.strategies.decentralised.wire import PeerMessageHeader, PeerMessageKind


class UpdateInbox:
    """Updates of other ranks, each taken once, in whatever order and however often they arrive.

    Along a graph, an update may arrive by several paths, and again when it is resent after a loss.
    """

    def __init__(self, peers: Iterable[int]) -> None:
        self._queue: deque[tuple[int, Tensor | None]] = deque()
        self._in_order = dict.fromkeys(peers, 0)
        """By origin: all updates up to this number have arrived."""
        self._out_of_order: set[tuple[int, int]] = set()
        """Origin and number of updates that have arrived before an earlier one."""
        self._applied = dict(self._in_order)
        """By origin: all updates up to this number are applied."""
        self._acknowledged = dict(self._in_order)
        """By origin: the number that was last acknowledged to it."""
        self._highest = dict(self._in_order)
        """By origin: the highest number that has arrived."""
        self._last_applied = dict(self._in_order)
        """By origin: the highest number of an update that is applied, also behind a gap."""

    def __len__(self) -> int:
        return len(self._queue)

    def accept(self, origin: int, number: int) -> bool:
        """Return whether an update is new, and remember that it has arrived."""
        in_order = self._in_order.get(origin)
        # None: this rank's own update that came back, or a rank that does not exist.
        if in_order is None or number <= in_order or (origin, number) in self._out_of_order:
            return False
        self._out_of_order.add((origin, number))
        self._highest[origin] = max(self._highest[origin], number)
        # The update may have filled a gap: count all that now follow without one.
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
        # Up to the first gap only: what arrived behind a gap is applied, but counts once the gap is filled.
        self._applied, self._last_applied = dict(self._in_order), dict(self._highest)

    def num_applied(self, origin: int) -> int:
        """Return the number up to which all updates of a rank are applied."""
        return self._applied[origin]

    @property
    def applied(self) -> dict[int, tuple[int, int]]:
        """By origin: the number up to which all updates are applied, and the highest number that is."""
        return {origin: (number, self._last_applied[origin]) for origin, number in self._applied.items()}

    def unacknowledged(self, at_least: int) -> list[int]:
        """Return the ranks of which this many updates or more are applied, but not acknowledged."""
        return [rank for rank, number in self._applied.items() if number - self._acknowledged[rank] >= at_least]

    def acknowledge(self, origin: int) -> int:
        """Return the number to acknowledge to a rank, and remember that it was."""
        self._acknowledged[origin] = self._applied[origin]
        return self._applied[origin]


class SentUpdates:
    """This rank's updates, kept until all living peers have acknowledged them, to resend what a loss has cut off."""

    def __init__(self, group: PeerGroup, peers: Iterable[int]) -> None:
        self.last_number = 0
        """Number of this rank's last update."""
        self._group = group
        self._kept: deque[tuple[PeerMessageHeader, Tensor]] = deque()
        self._acknowledged = dict.fromkeys(peers, 0)
        """By peer: it has applied all updates up to this number."""

    def __len__(self) -> int:
        return len(self._kept)

    def next_header(self, message: Tensor) -> PeerMessageHeader:
        """Count an update, and return its header."""
        self.last_number += 1
        kind, rank = PeerMessageKind.UPDATE, self._group.rank
        return PeerMessageHeader(kind, self.last_number, rank, num_bytes=message.nbytes)

    def keep(self, header: PeerMessageHeader, message: Tensor) -> None:
        """Keep an update, to be able to send it again."""
        self._kept.append((header, message))

    def is_behind(self, peer: int, max_ahead: int) -> bool:
        """Whether a peer must apply updates before the next is sent: it lacks `max_ahead` already."""
        is_awaited = peer in self._group.alive and peer not in self._group.away
        # A peer on leave need not keep up: when it joins, it acknowledges what it has applied.
        return is_awaited and self.last_number - self._acknowledged[peer] >= max_ahead

    def acknowledge(self, peer: int, number: int) -> None:
        """Note that a peer has applied all updates up to a number."""
        self._acknowledged[peer] = max(self._acknowledged[peer], number)  # Acknowledgements may arrive late.
        self.drop_acknowledged()

    def resend(self, peer: int) -> None:
        """Send a peer directly what it has not acknowledged: a lost rank may not have passed it on."""
        for header, message in self._kept:
            if header.number > self._acknowledged[peer]:
                self._group.send(peer, header, message)

    def resend_to_all(self) -> None:
        """Send every living peer what it has not acknowledged."""
        for peer in sorted(self._group.others):
            self.resend(peer)

    def drop_acknowledged(self) -> None:
        """Drop the updates that all living peers have acknowledged."""
        # Lost peers no longer count: they would keep every later update in memory.
        numbers = (self._acknowledged[peer] for peer in self._group.others)
        # Updates are kept in the order of their numbers, so those to drop are at the front.
        least = min(numbers, default=self.last_number)
        while self._kept and self._kept[0][0].number <= least:
            self._kept.popleft()
