"""Consistency of parameter servers: when servers make a version, and how stale a version a worker may read.

There are two kinds. Under a *clocked* consistency (`BSP`, `SSP`), version c + 1 is made of the update of clock c of
every worker, and a worker may read a version that is at most so many versions behind its own clock. Under a *counting*
consistency (`SoftSync`, `Async`), a version is made of the next so many updates, whichever workers sent them, and a
worker may read once its own last update is in a version. `ledger.py` implements both.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

from tutti.errors import ConfigError
from tutti.strategies.rates import SAME_RATE, LearningRateRule, stale_rule, synchronous_start_rule


class Consistency(ABC):
    """How far workers may drift apart: frozen, equal by value, printed as at the command line."""

    @property
    @abstractmethod
    def bound(self) -> int | None:
        """The largest staleness of a read, in versions; None for a counting consistency, which has no bound."""

    @property
    def quorum(self) -> int:
        """Number of updates that make a version, under a counting consistency."""
        return 1

    eager = False
    """Whether workers pull in every iteration, also if their version is fresh enough (clocked consistency only)."""
    locks = True
    """Whether workers that share memory take a lock to step the parameters."""

    def scale(self, staleness: int, num_workers: int) -> float:
        """Return the factor of an update that was computed from parameters `staleness` versions old."""
        return 1.0

    @abstractmethod
    def learning_rate(self, num_workers: int) -> LearningRateRule:
        """Return the rule for the learning rate, as `Strategy.learning_rate` does."""

    @abstractmethod
    def __str__(self) -> str: ...


@dataclass(frozen=True)
class BSP(Consistency):
    """Bulk synchronous: a read in iteration c contains every living worker's updates of all iterations before c."""

    @property
    def bound(self) -> int:
        return 0

    def learning_rate(self, num_workers: int) -> LearningRateRule:
        return SAME_RATE

    def __str__(self) -> str:
        return "bsp"


@dataclass(frozen=True)
class SSP(Consistency):
    """Stale synchronous parallel: bounded staleness (Ho et al. 2013).

    A read in iteration c contains every living worker's updates of all iterations before c - staleness.

    Args:
        staleness: how many iterations the fastest worker may be ahead of the slowest.
        eager: pull in every iteration, and load what arrives (Dai et al. 2015): fresher parameters, for as many bytes
            as BSP. Otherwise a worker keeps its version while that is fresh enough.
    """

    staleness: int
    eager: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.staleness, int) or self.staleness < 0:
            raise ConfigError(
                f"SSP needs a staleness of 0 or more steps, got {self.staleness!r}. Use SSP(0) (ps:ssp=0) for "
                "synchronous steps, Async() (ps:async) for no bound."
            )

    @property
    def bound(self) -> int:
        return self.staleness

    def learning_rate(self, num_workers: int) -> LearningRateRule:
        if num_workers == 1:
            return SAME_RATE
        return synchronous_start_rule(
            self.staleness, f"Under '{self}' updates are computed from parameters up to {self.staleness} steps old"
        )

    def __str__(self) -> str:
        return f"ssp={self.staleness}" + (",eager" if self.eager else "")


@dataclass(frozen=True)
class SoftSync(Consistency):
    """A version for every `count` updates (Zhang et al. 2016); a read contains all of the reader's own updates.

    Where fewer than `count` workers are left, one update of each makes a version.

    Args:
        count: number of updates in a version.
    """

    count: int

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or self.count < 1:
            raise ConfigError(
                f"SoftSync needs a count of 1 or more updates per version, got {self.count!r}. A count of 1 is "
                "Async(); the number of workers makes steps almost synchronous."
            )

    @property
    def bound(self) -> None:
        return None

    @property
    def quorum(self) -> int:
        return self.count

    def learning_rate(self, num_workers: int) -> LearningRateRule:
        return _counting_rule(self, num_workers)

    def __str__(self) -> str:
        return f"softsync={self.count}"


@dataclass(frozen=True)
class Async(Consistency):
    """A version for every update, in order of arrival; a read contains all of the reader's own updates.

    Args:
        locks: on one host, where workers step the parameters in shared memory themselves, whether they take a lock.
            Without it (Hogwild, Niu et al. 2011) no worker waits; of two writes to one element at once, one is lost.
    """

    locks: bool = False

    @property
    def bound(self) -> None:
        return None

    def learning_rate(self, num_workers: int) -> LearningRateRule:
        return _counting_rule(self, num_workers)

    def __str__(self) -> str:
        return "async,locks" if self.locks else "async"


def _counting_rule(consistency: Consistency, num_workers: int) -> LearningRateRule:
    """Return the rule of a counting consistency: N workers make N / quorum steps where all-reduce makes one.

    While a worker computes, each of the others sends an update, so that its own is about N / quorum steps old.
    """
    num_steps = _steps_for_one(consistency, num_workers)
    return stale_rule(
        num_steps, f"Under '{consistency}' {num_workers} workers take {num_steps:g} steps where one worker takes one"
    )


def _steps_for_one(consistency: Consistency, num_workers: int) -> float:
    """Return how many versions are made where one worker makes one, under a counting consistency."""
    # With fewer workers than the quorum, one update of each makes a version.
    return num_workers / min(consistency.quorum, num_workers)


def inverse(staleness: int) -> float:
    """Return 1 / staleness, and 1 for a fresh update."""
    return 1 / max(1, staleness)


@dataclass(frozen=True)
class StalenessAware(Consistency):
    """Scales every update down by its staleness (Zhang et al. 2016); otherwise works as `inner`.

    Args:
        inner: when versions are made and who may read.
        factor: returns the factor of an update from its staleness, in versions. By default it is 1 / staleness. Under
            `Async` and `SoftSync(k)` an update counts as no fresher than N / k - 1 versions, which is usual for N
            workers.
    """

    inner: Consistency
    factor: Callable[[int], float] = inverse

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Consistency) or isinstance(self.inner, StalenessAware):
            raise ConfigError(f"StalenessAware needs BSP, SSP, SoftSync or Async inside, got {self.inner!r}.")

    @property
    def bound(self) -> int | None:
        return self.inner.bound

    @property
    def quorum(self) -> int:
        return self.inner.quorum

    @property
    def locks(self) -> bool:  # type: ignore[override]
        return self.inner.locks

    @property
    def eager(self) -> bool:  # type: ignore[override]
        return self.inner.eager

    def scale(self, staleness: int, num_workers: int) -> float:
        if self.factor is inverse and self.bound is None:
            # An update of one worker has the samples of one worker, however fresh it is. Counted in full, one that
            # happens to be fresh, after an evaluation for example, would move parameters N times as far as the others.
            return 1 / max(1, staleness, _steps_for_one(self, num_workers) - 1)
        return float(self.factor(staleness))

    def learning_rate(self, num_workers: int) -> LearningRateRule:
        rule = self.inner.learning_rate(num_workers)
        if rule == SAME_RATE:
            return rule
        # Servers divide the oldest update by the bound themselves; without one, of N steps for each of one worker, an
        # update is N - 1 old.
        staleness = _steps_for_one(self, num_workers) - 1 if self.bound is None else self.bound
        by_servers = float(max(1, staleness))
        return replace(rule, factor=rule.factor * by_servers, gradient_scale=1 / by_servers)

    def __str__(self) -> str:
        return f"{self.inner},aware" + ("" if self.factor is inverse else f"={self._factor_name}")

    def __repr__(self) -> str:
        # Ranks compare it. The function's address, which differs between processes, is left out.
        return f"StalenessAware(inner={self.inner!r}, factor={self._factor_name})"

    @property
    def _factor_name(self) -> str:
        return getattr(self.factor, "__qualname__", type(self.factor).__qualname__)
