"""Work and depth of a computation, and Brent's bounds on its time."""

from typing import NamedTuple

from tutti.errors import ConfigError


class WorkDepth(NamedTuple):
    """The number of operations, W, and the length of the longest chain of dependent ones, D."""

    work: float
    depth: float

    @property
    def parallelism(self) -> float:
        """Average number of operations that can run at once: W / D."""
        return self.work / self.depth if self.depth else 0.0

    def bounds(self, num_processors: int) -> tuple[float, float]:
        """Return the least and the most time on p processors, in operations: max(W/p, D) <= T_p <= W/p + D.

        After Brent (1974). Fourie (2019) prints min instead of max, which is a weaker bound: the time is at least the
        work of one processor, and also at least the longest chain.
        """
        if num_processors < 1:
            raise ConfigError(f"bounds need 1 processor or more, got {num_processors}.")
        share = self.work / num_processors
        return max(share, self.depth), share + self.depth

    def followed_by(self, other: "WorkDepth") -> "WorkDepth":
        """Return the work and depth of both, run one after the other."""
        return WorkDepth(self.work + other.work, self.depth + other.depth)

    def in_parallel_with(self, other: "WorkDepth") -> "WorkDepth":
        """Return the work and depth of both, run at the same time."""
        return WorkDepth(self.work + other.work, max(self.depth, other.depth))
