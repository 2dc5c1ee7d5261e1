"""How far workers may drift apart: when servers take a step, and how old what a worker reads may be.

Two kinds of rule. Under a *clocked* one (`BSP`, `SSP`), step number c of the servers is made of the c-th update of
every worker, and a worker waits until what it reads is at most so many steps behind its own. Under a *counting* one
(`SoftSync`, `Async`), a step is made of the next so many updates, whoever sent them, and a worker waits until its own
last one is in.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from tutti.errors import ConfigError


class Consistency(ABC):
    """A rule: frozen, comparable, printed as at the command line."""

    @property
    @abstractmethod
    def bound(self) -> int | None:
        """Of a clocked rule: by how many steps what a worker reads may be behind its own; None for a counting one."""

    @property
    def quorum(self) -> int:
        """Of a counting rule: how many updates make a step."""
        return 1

    eager = False
    """Of a clocked rule: whether workers ask for what is new before they have to."""
    locks = True
    """Whether workers that share memory take turns at stepping what is in it."""

    def scale(self, staleness: int) -> float:
        """What an update is multiplied by that was computed from parameters so many steps old."""
        return 1.0

    @abstractmethod
    def __str__(self) -> str: ...


@dataclass(frozen=True)
class BSP(Consistency):
    """Lockstep: a read in iteration c holds every update of the iterations before c, of every living worker."""

    @property
    def bound(self) -> int:
        return 0

    def __str__(self) -> str:
        return "bsp"


@dataclass(frozen=True)
class SSP(Consistency):
    """Bounded staleness (Ho et al. 2013).

    A read in iteration c holds every update of the iterations before c - staleness, of every living worker.

    Args:
        staleness: how many iterations the fastest may be ahead of the slowest.
        eager: ask for what is new in every iteration, and take it when it comes (Dai et al. 2015): fresher, for as many
            bytes as lockstep. Otherwise a worker keeps what it has while that is fresh enough.
    """

    staleness: int
    eager: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.staleness, int) or self.staleness < 0:
            raise ConfigError(
                f"SSP needs a staleness of 0 or more steps, got {self.staleness!r}. Use SSP(0) (ps:ssp=0) for "
                "lockstep, Async() (ps:async) for no bound."
            )

    @property
    def bound(self) -> int:
        return self.staleness

    def __str__(self) -> str:
        return f"ssp={self.staleness}" + (",eager" if self.eager else "")


@dataclass(frozen=True)
class SoftSync(Consistency):
    """A step for any `count` updates (Zhang et al. 2016): a read holds every update of the reader's own.

    Where fewer workers than `count` are left, as many as there are make a step.
    """

    count: int

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or self.count < 1:
            raise ConfigError(
                f"SoftSync needs a count of 1 or more updates to a step, got {self.count!r}. 1 is Async(), as many as "
                "there are workers is lockstep."
            )

    @property
    def bound(self) -> None:
        return None

    @property
    def quorum(self) -> int:
        return self.count

    def __str__(self) -> str:
        return f"softsync={self.count}"


@dataclass(frozen=True)
class Async(Consistency):
    """A step for every update, as it comes: a read holds every update of the reader's own.

    Args:
        locks: on one host, where workers step parameters in shared memory themselves, whether they take turns at it.
            Without, as in Hogwild (Niu et al. 2011), nobody waits; of two that write an element at once, one is lost.
    """

    locks: bool = False

    @property
    def bound(self) -> None:
        return None

    def __str__(self) -> str:
        return "async,locks" if self.locks else "async"


def inverse(staleness: int) -> float:
    """One over the staleness, and 1 for what is fresh."""
    return 1 / max(1, staleness)


@dataclass(frozen=True)
class StalenessAware(Consistency):
    """Reads as `inner` does; every update is scaled down by how stale it is (Zhang et al. 2016).

    Args:
        factor: from the number of steps that the servers took since what the update was computed from.
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

    def scale(self, staleness: int) -> float:
        return float(self.factor(staleness))

    def __str__(self) -> str:
        return f"{self.inner},aware" + ("" if self.factor is inverse else f"={self._factor_name}")

    def __repr__(self) -> str:
        # Ranks compare it: without the function's address, which is another in every process.
        return f"StalenessAware(inner={self.inner!r}, factor={self._factor_name})"

    @property
    def _factor_name(self) -> str:
        return getattr(self.factor, "__qualname__", type(self.factor).__qualname__)
