"""Everything Tutti raises on purpose.

    TuttiError
    ├── ConfigError            (also a ValueError) something the caller gave cannot work
    │   ├── UnknownName        a strategy, recipe or other name nobody knows
    │   ├── EnvironmentConflict  launchers' variables that contradict each other
    │   ├── ReplicaMismatch    models, optimisers or tensors that differ between ranks
    │   ├── NoLink             simulated ranks talk whose hosts no link joins
    │   ├── NotPriced          a strategy without a cost formula
    │   ├── PluginError        a package that offers something by an entry point, and offers it wrongly
    │   └── DataError          a dataset that is missing, truncated or something else
    ├── RankLost               (also a RuntimeError) a peer died, failed or left while this rank needed it
    ├── DeadlineExceeded       (also a TimeoutError and a RuntimeError) nobody died, but nobody answered either
    ├── Deadlock               every simulated rank waits for another
    ├── WorkerDropped          a server takes nothing more from this worker, which sent what cannot be
    ├── PacketError            bytes that no codec of that kind could have made for such a tensor
    ├── WeightRefused          a rank gave NaN as its weight, which asks every rank to stop
    ├── NonFiniteLoss          the loss became NaN or infinite
    └── WorkerFailed           seen from the launcher: the first worker that failed

Messages say what was got, what was wanted and what to do next, and start with the rank where
there is more than one.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class TuttiError(Exception):
    """The root of the tree."""


class ConfigError(TuttiError, ValueError):
    """Something the caller gave cannot work."""


class UnknownName(ConfigError):
    """A name that is in no registry."""

    def __init__(self, kind: str, got: str, known: Iterable[str], notes: Iterable[str] = ()) -> None:
        names = sorted(known)
        close = get_close_matches(got, names, n=1)
        more = "".join(f" {note.rstrip('.')}." for note in notes)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        super().__init__(f"unknown {kind} '{got}'.{hint} Known: {', '.join(names)}.{more}")


class EnvironmentConflict(ConfigError):
    """Launchers' environment variables that contradict each other."""


class ReplicaMismatch(ConfigError):
    """Models, optimisers or tensors that differ between ranks."""


class DataError(ConfigError):
    """A dataset that is missing, truncated or not what its name says."""


class NoLink(ConfigError):
    """Simulated ranks talk whose hosts no link joins."""


class PluginError(ConfigError):
    """A package offers something by an entry point that cannot be loaded, has a wrong type or a name taken twice."""


class NotPriced(ConfigError):
    """A strategy without a cost formula, which the planner cannot compare with others."""


class RankLost(TuttiError, RuntimeError):
    """A peer died, failed or left while this rank needed it."""

    def __init__(self, message: str, gone: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.gone = gone or {}
        """Who is gone, and how that is known."""


class DeadlineExceeded(TuttiError, TimeoutError, RuntimeError):
    """A wait ended without an answer."""


class Deadlock(TuttiError):
    """Every simulated rank that has not ended waits for another."""


class WorkerDropped(TuttiError):
    """A server takes nothing more from this worker."""


class PacketError(TuttiError):
    """Bytes that cannot be decoded: truncated, of another version or codec, or contradicting themselves."""


class WeightRefused(TuttiError):
    """Some ranks gave NaN as their weight: they ask every rank to stop."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = sorted(ranks)
        super().__init__(f"weight NaN from rank {', '.join(map(str, self.ranks))}")


class NonFiniteLoss(TuttiError):
    """The loss became NaN or infinite."""

    def __init__(self, rank: int, ranks: list[int], step: int) -> None:
        self.elsewhere = rank not in ranks
        whose = " and ".join(f"rank {other}" for other in ranks)
        super().__init__(
            f"rank {rank}: the loss on {whose} is NaN or infinite at step {step}. Lower the learning rate, clip "
            "gradients, or look at that rank's batch."
        )


class WorkerFailed(TuttiError):
    """The first worker of a launch that failed, with its traceback."""

    def __init__(self, rank: int, reason: str, traceback: str = "", status: int = 1) -> None:
        super().__init__(f"rank {rank} {reason}" + (f"\n{traceback.rstrip()}" if traceback else ""))
        self.rank = rank
        self.reason = reason
        self.traceback = traceback
        self.status = status

    def __reduce__(self) -> tuple[type["WorkerFailed"], tuple[int, str, str, int]]:
        return type(self), (self.rank, self.reason, self.traceback, self.status)
