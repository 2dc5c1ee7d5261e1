"""The exceptions that Tutti raises on purpose.

    TuttiError
    ├── ConfigError            (also a ValueError) an argument, option or file that cannot work
    │   ├── UnknownName        the name of a strategy, recipe or the like that does not exist
    │   ├── EnvironmentConflict  environment variables of launchers that contradict each other
    │   │   └── TrainingEnded  a worker came to an elastic run whose training has ended
    │   ├── ReplicaMismatch    models, optimisers or tensors that differ between ranks
    │   ├── NoLink             a simulated message between hosts that no link joins
    │   ├── NotPriced          a strategy without a cost formula
    │   ├── PluginError        a package that offers something by an entry point, and offers it wrongly
    │   ├── DataError          a dataset that is missing, truncated or not the one named
    │   └── CheckpointError    a checkpoint that is missing, damaged, of a newer format, or cannot be written
    ├── UnsupportedVersion     (also an ImportError) a version of torch with which Tutti does not work
    ├── RankLost               (also a RuntimeError) a peer died, failed or left while this rank waited for it
    ├── TooFewWorkers          so many workers were lost that training cannot go on
    ├── StateLost              a part of the model was lost with the ranks that had it
    ├── DeadlineExceeded       (also a TimeoutError and a RuntimeError) no answer in time, and no rank known to be gone
    ├── Deadlock               every simulated rank waits for another
    ├── WorkerDropped          a parameter server has excluded this worker, which sent an invalid update
    ├── PacketError            bytes that cannot be decoded as a packet for such a tensor
    ├── WeightRefused          a rank gave NaN as its weight, which stops every rank
    ├── DifferentCalls         ranks are in different collective calls of a job, or some are in none
    ├── NonFiniteLoss          the loss became NaN or infinite
    ├── NonFiniteValues        a parameter or a gradient became NaN or infinite
    ├── TargetMissed           a training run that ended below its recipe's target accuracy
    ├── StoreLost              raised by the launcher: the process that serves torch's store for the run has ended
    └── WorkerFailed           raised by the launcher: the first worker that failed

Messages say what was given, what was expected and what to do next. They start with the rank where there are several.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class TuttiError(Exception):
    """Base class of all exceptions of Tutti."""


class ConfigError(TuttiError, ValueError):
    """An argument, option or file of the caller's cannot work."""


class UnknownName(ConfigError):
    """The name of a strategy, recipe or the like does not exist; the message lists those that do."""

    def __init__(self, kind: str, got: str, known: Iterable[str], notes: Iterable[str] = ()) -> None:
        names = sorted(set(known))
        close = get_close_matches(got, names, n=1)
        more = "".join(f" {note.rstrip('.')}." for note in notes)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        super().__init__(f"unknown {kind} '{got}'.{hint} Known: {', '.join(names)}.{more}")


class EnvironmentConflict(ConfigError):
    """Environment variables of launchers contradict each other."""


class TrainingEnded(EnvironmentConflict):
    """A worker came to an elastic run whose training has ended. The launcher does not count that as a failure."""


class ReplicaMismatch(ConfigError):
    """Models, optimisers or tensors differ between ranks."""


class DataError(ConfigError):
    """A dataset is missing, truncated or not the one that its name says."""


class CheckpointError(ConfigError):
    """A checkpoint is missing, damaged or of a newer format, or cannot be written."""


class NoLink(ConfigError):
    """A simulated rank sends to another, and no link of the cluster joins their hosts."""


class PluginError(ConfigError):
    """A package offers something by an entry point that cannot be loaded, has a wrong type or a name taken twice."""


class NotPriced(ConfigError):
    """A strategy without a cost formula, which the planner cannot compare with others."""


class UnsupportedVersion(TuttiError, ImportError):
    """A package is installed in a version with which Tutti does not work."""

    def __init__(self, package: str, found: str, supported: tuple[str, str]) -> None:
        oldest, newest = supported
        major, minor = newest.split(".")
        super().__init__(
            f"{package} {found} is installed, and Tutti supports {package} {oldest} to {newest}. Install one of these: "
            f"pip install '{package}>={oldest},<{major}.{int(minor) + 1}'"
        )


class RankLost(TuttiError, RuntimeError):
    """A peer died, failed or left while this rank waited for it."""

    def __init__(self, message: str, gone: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.gone = gone or {}
        """The ranks that are gone, and how each of them went."""


class TooFewWorkers(TuttiError):
    """So many workers of an elastic run were lost, and not replaced, that fewer than its minimum are left."""


class StateLost(TuttiError):
    """Ranks were lost, and a part of the model or of the optimiser's state with them that no other rank has."""


class DeadlineExceeded(TuttiError, TimeoutError, RuntimeError):
    """A wait reached its deadline without an answer, and no rank is known to be gone."""


class Deadlock(TuttiError):
    """Every simulated rank that has not ended waits for another."""


class WorkerDropped(TuttiError):
    """A parameter server has excluded this worker and takes no more updates from it."""


class PacketError(TuttiError):
    """Bytes that cannot be decoded: truncated, of another version or codec, or contradicting themselves."""


class WeightRefused(TuttiError):
    """Some ranks, numbered as in the whole world, gave NaN as their weight, which stops every rank."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = sorted(ranks)
        super().__init__(f"weight NaN from rank {', '.join(map(str, self.ranks))}")


class DifferentCalls(TuttiError):
    """Ranks are in different collective calls of a job, or some are in none."""

    def __init__(self, weights: Iterable[float]) -> None:
        self.weights = list(weights)
        """What each rank gave as its weight: that of a backward pass, or the negative number of a call."""
        super().__init__(f"ranks are in different calls, by weights {self.weights}")


class NonFiniteLoss(TuttiError):
    """The loss became NaN or infinite."""

    def __init__(self, rank: int, ranks: list[int], step: int) -> None:
        """Make the error for `rank` to raise, because of `ranks`: all are ranks of the whole world."""
        self.elsewhere = rank not in ranks
        whose = " and ".join(f"rank {other}" for other in ranks)
        super().__init__(
            f"rank {rank}: the loss on {whose} is NaN or infinite at step {step}. Lower the learning rate, clip "
            "gradients, or look at that rank's batch."
        )


class NonFiniteValues(TuttiError):
    """A parameter or a gradient became NaN or infinite."""

    def __init__(self, rank: int, ranks: list[int], what: str, step: int) -> None:
        self.elsewhere = bool(ranks) and rank not in ranks
        whose = " and ".join(f"rank {other}" for other in ranks) or "some rank"
        super().__init__(
            f"rank {rank}: {what} is NaN or infinite at step {step}, first on {whose}. Lower the learning rate, clip "
            "gradients, or look at that rank's batches; job.watch(loss) stops before such a step."
        )


class TargetMissed(TuttiError):
    """A training run ended below its recipe's target accuracy. Commands then exit with status 3."""


class StoreLost(TuttiError):
    """The process that serves the store of a launch, which torch's own groups use, ended before the ranks."""


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
