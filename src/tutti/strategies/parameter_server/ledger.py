"""What a server knows of one piece: who has sent what, what is due, and who may read."""

from dataclasses import dataclass, field
from typing import Any

from tutti.strategies.parameter_server.consistency import Consistency


@dataclass(eq=False)
class Update:
    """A worker's gradient of one piece, and what goes with it."""

    worker: int
    base: int
    """The version of the parameters that it was computed from."""
    weight: float
    norm: float
    """Of the whole gradient, where each update is clipped by itself."""
    options: Any
    """The optimiser's, as the worker has them."""
    marks: Any
    """Which shares it has a gradient for."""
    values: Any
    clock: int = 0
    staleness: int = 0


@dataclass
class Order:
    """Which updates, as workers and clocks, make which version: one rank decides, and all servers keep to it."""

    living: set[int]
    """Whose updates may still come."""
    sets: list[set[tuple[int, int]]] = field(default_factory=list)
    """Those that are still to be used."""
    num_forgotten: int = 0

    def at(self, place: int) -> set[tuple[int, int]] | None:
        """The one of that number, if it is decided."""
        place -= self.num_forgotten
        return self.sets[place] if place < len(self.sets) else None

    def forget(self, place: int) -> None:
        """Those before that number have been used by all."""
        del self.sets[: place - self.num_forgotten]
        self.num_forgotten = place

    def clear(self) -> None:
        self.sets.clear()
        self.num_forgotten = 0


class Ledger:
    """Decides which updates make the next version, whatever order they come in.

    Updates of one worker come in order. Those who have left count no more towards anything, but what they have sent
    does: so whoever waits here waits for the living.
    """

    def __init__(self, consistency: Consistency, members: set[int], order: "Order | None" = None) -> None:
        """`order` says which updates make which version, where pieces of several servers must agree on it."""
        self.version = 0
        self._order = order
        self.place = 0
        self._rule = consistency
        self._members = members
        """Those who are waited for. Shared with the other pieces of the server."""
        self._clocks = dict.fromkeys(members, 0)
        """Of each worker's next update."""
        self._pending: list[Update] = []

    def restart(self) -> None:
        """Begin again, with everybody at the first version."""
        self.version = 0
        self.place = 0
        self._clocks = dict.fromkeys(self._clocks, 0)
        self._pending.clear()

    @property
    def idle(self) -> bool:
        """Whether all that has come is applied."""
        return not self._pending

    def drop(self, worker: int) -> None:
        """Forget what has come from a worker that is lost: where an order is kept, it may never come into it."""
        if self._order is not None:
            self._pending = [update for update in self._pending if update.worker != worker]

    def clock_of(self, worker: int) -> int:
        """How many updates have come from a worker, and from those that it joined before."""
        return self._clocks[worker]

    @property
    def waits(self) -> bool:
        """Under a clocked rule: whether somebody has still to send for the next version."""
        return any(self._clocks[worker] <= self.version for worker in self._members)

    @property
    def next_clock(self) -> int | None:
        """Of the next update that is to be taken, if there is one."""
        return min((update.clock for update in self._pending), default=None)

    def skip(self, clock: int) -> None:
        """There was nothing here for the version of that number, and there will be nothing."""
        self.version = max(self.version, clock + 1)

    def join(self, worker: int) -> None:
        """A worker's next update is for the next version."""
        if self._rule.bound is not None:
            self._clocks[worker] = max(self.version, self._clocks[worker])  # What it sent before is still to come.

    def push(self, update: Update) -> None:
        """An update has come."""
        update.clock = self._clocks[update.worker]
        self._clocks[update.worker] += 1
        self._pending.append(update)

    def take(self) -> list[Update]:
        """The updates that make the next version, in the order of workers, if it is due; they are gone from here."""
        due = self._due()
        if due:
            self._pending = [update for update in self._pending if update not in due]
            for update in due:
                update.staleness = self.version - update.base
            self.version += 1
            self.place += 1
        return sorted(due, key=lambda update: update.worker)

    def _due(self) -> list[Update]:
        if not self._pending:
            return []
        if self._order is not None:
            return self._ordered()
        if self._rule.bound is None:
            enough = min(self._rule.quorum, len(self._members) or len(self._pending))
            return self._pending[:enough] if len(self._pending) >= enough else []
        if self.waits:
            return []
        # Where those who had sent for this version are gone and forgotten, the next one that there is something for.
        self.version = max(self.version, min(update.clock for update in self._pending))
        return [update for update in self._pending if update.clock == self.version]

    def _ordered(self) -> list[Update]:
        assert self._order is not None
        while (wanted := self._order.at(self.place)) is not None:
            here = [update for update in self._pending if (update.worker, update.clock) in wanted]
            coming = {worker for worker, _ in wanted} - {update.worker for update in here}
            if coming & self._order.living:
                return []
            if here:
                return here
            self.place += 1  # All of it is lost.
        return []

    def readable(self, worker: int, wanted: int) -> bool:
        """Whether a worker that wants so high a version, or its own updates in it, may read."""
        if self._rule.bound is None:
            return all(update.worker != worker for update in self._pending)
        return self.version >= wanted
