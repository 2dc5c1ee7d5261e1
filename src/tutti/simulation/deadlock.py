"""The error of a simulation in which every rank waits for another, with a table of who waits for what."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tutti.cluster import format_time
from tutti.errors import Deadlock

if TYPE_CHECKING:
    from tutti.simulation.rank import Rank

_TABLE_ROWS = 24


def deadlock_error(ranks: Sequence["Rank"]) -> Deadlock:
    """Return the error that lists what each rank waits for, and since when."""
    rows = [f"  rank {rank.number:<4} at {format_time(rank.clock):>8}  {_status(rank)}" for rank in ranks]
    if len(rows) > _TABLE_ROWS:
        rows = [*rows[:_TABLE_ROWS], f"  ... and {len(rows) - _TABLE_ROWS} more"]
    return Deadlock("deadlock: every rank that has not ended waits for another.\n" + "\n".join(rows))


def _status(rank: "Rank") -> str:
    """Describe what a rank does, as the predicate of a sentence about it."""
    thread, work = rank.thread, rank.waiter.awaited
    if rank.gone is not None or thread.ended:
        return "has ended" if thread.error is None else f"has failed: {type(thread.error).__name__}"
    return "runs" if work is None else f"waits for {work.describe()}"
