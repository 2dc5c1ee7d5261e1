"""Sets of workers that a server keeps: alive, waited for, at the barrier."""

from collections.abc import Iterable


class WorkerMembership:
    """Which workers are alive, which are waited for, and which wait at the barrier.

    The sets are shared by reference: ledgers read `members`, an `UpdateOrder` reads `alive`. They are changed in place,
    by `WorkerLifecycle` and `Server.load_state` only. `lost` and `is_frozen` are set once.
    """

    def __init__(self, workers: Iterable[int]) -> None:
        self.alive = set(workers)
        """Workers that may still send requests."""
        self.members = set(self.alive)
        """Workers whose updates a version waits for: alive, not on leave, not at the barrier."""
        self.at_barrier: set[int] = set()
        self.stopped_by: int | None = None
        """The worker that asked all workers to stop."""
        self.lost: int | None = None
        """The rank, in the world, without which this server makes no more versions."""
        self.is_frozen = False
        """Whether nothing may change here any more: a rank is lost, and what this server holds is or will be saved."""

    @property
    def leader(self) -> int:
        """The lowest rank of a living worker."""
        return min(self.alive, default=0)

    @property
    def is_barrier_complete(self) -> bool:
        """Whether every living worker waits at the barrier."""
        return bool(self.at_barrier) and self.at_barrier == self.alive

    def remove(self, worker: int) -> None:
        """Forget a worker that has left or is lost."""
        self.alive.discard(worker)
        self.at_barrier.discard(worker)
        self.members.discard(worker)

    def wait_for_all(self) -> None:
        """Make every living worker a member."""
        self.members.clear()
        self.members.update(self.alive)
