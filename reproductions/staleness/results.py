"""Results of the reproduction on staleness."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

ClusterName = Literal["even", "one slow", "pauses"]

BSP = "BSP"
ASYNC = "async, rate / N"
ASYNC_FULL_RATE = "async, full rate"
ASYNC_AWARE = "async, staleness-aware"
SOFT_SYNC = "soft-sync N/2"
SSP_RULES = ("SSP 1", "SSP 3", "SSP 10", "SSP 3, eager")

MIN_CLEAR_POINTS = 3.0
"""A smaller difference in test accuracy, in percentage points, is never clear."""


def num_servers(workers: int) -> int:
    """Return the number of dedicated servers: one for every eight workers."""
    return -(-workers // 8)


@dataclass(frozen=True)
class ConsistencyRule:
    """A consistency model of the parameter servers, and the learning rate used with it."""

    name: str
    consistency: str
    """Option of the strategy `ps`; {half} stands for half of the workers."""
    full_rate: bool = False
    """Whether every server step has the whole learning rate, however few updates it is made of."""

    def strategy(self, workers: int) -> str:
        """Return the text of the strategy for a number of workers."""
        return f"ps:{self.consistency.format(half=workers // 2)},servers={num_servers(workers)},overlap=0"


RULES = (
    ConsistencyRule(BSP, "bsp"),
    ConsistencyRule("SSP 1", "ssp=1"),
    ConsistencyRule("SSP 3", "ssp=3"),
    ConsistencyRule("SSP 10", "ssp=10"),
    ConsistencyRule("SSP 3, eager", "ssp=3,eager"),
    ConsistencyRule(SOFT_SYNC, "softsync={half}"),
    ConsistencyRule(ASYNC, "async"),
    ConsistencyRule(ASYNC_FULL_RATE, "async", full_rate=True),
    ConsistencyRule(ASYNC_AWARE, "async,aware", full_rate=True),
)


@dataclass(frozen=True, kw_only=True)
class StalenessTask:
    """A recipe on a part of its data, and the workers, clusters and rules with which it is trained."""

    name: str
    recipe: str
    batch: int
    """Samples per step of all workers together."""
    num_train: int
    num_test: int
    epochs: int
    learning_rate: float
    """Learning rate of a step that is made of one update of every worker."""
    momentum: float = 0.0
    tests_per_epoch: int = 3
    workers: tuple[int, ...] = (8, 32)
    clusters: tuple[ClusterName, ...] = ("even", "one slow", "pauses")
    rules: tuple[ConsistencyRule, ...] = RULES


class AccuracyPoint(NamedTuple):
    """One test during training."""

    epochs: float
    seconds: float
    """Virtual seconds since the start of training."""
    accuracy: float


@dataclass(frozen=True, kw_only=True)
class StalenessRun:
    """One training run in virtual time."""

    task: str
    workers: int
    cluster: ClusterName
    rule: str
    strategy: str
    batch: int
    """Samples in one worker's batch."""
    learning_rate: float
    accuracy: float
    """Final test accuracy."""
    epochs: float
    seconds: float
    """Virtual seconds of the whole training."""
    epoch_s: float
    """Virtual seconds per epoch's worth of samples."""
    busy_fraction: float
    """Fraction of the time in which the workers compute."""
    staleness: dict[int, int]
    """Number of updates by their staleness in server steps."""
    points: tuple[AccuracyPoint, ...]

    def seconds_to(self, accuracy: float) -> float | None:
        """Return the virtual seconds until an accuracy was first reached; None if it never was."""
        return next((point.seconds for point in self.points if point.accuracy >= accuracy), None)

    @property
    def mean_staleness(self) -> float:
        """Mean staleness of an update, in server steps."""
        total = sum(self.staleness.values())
        return sum(number * count for number, count in self.staleness.items()) / total


@dataclass(frozen=True, kw_only=True)
class StalenessResults:
    """All training runs."""

    machine: str
    quick: bool
    step_s: float
    """Virtual seconds of computation per step of a worker, whatever its batch."""
    link: str
    """Link of every host."""
    jitter: float
    """Relative spread of the compute times."""
    pause_every_s: float
    pause_s: float
    """Mean length of a pause on the cluster *pauses*."""
    slowdown: float
    """How many times as long the slow worker computes on the cluster *one slow*."""
    tasks: tuple[StalenessTask, ...]
    runs: tuple[StalenessRun, ...]

    def clear_points(self, task: str) -> float:
        """Return from how many points on a difference in accuracy is clear.

        This is the largest drop of BSP's accuracy from one test to the next, and at least `MIN_CLEAR_POINTS`.
        """
        drops = [MIN_CLEAR_POINTS]
        for run in self.runs:
            if (run.task, run.rule) == (task, BSP):
                drops += [100 * (before.accuracy - after.accuracy) for before, after in pairwise(run.points)]
        return max(drops)
