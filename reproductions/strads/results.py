"""Results of the reproduction of STRADS."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from reproductions.strads.problems import LassoSize, MatrixSize

ProblemName = Literal["lasso", "matrix"]
SIMULATED = "simulated"
"""In place of a transport, for ranks in virtual time."""


@dataclass(frozen=True, kw_only=True)
class StradsConfig:
    """What is solved."""

    lasso: LassoSize
    matrix: MatrixSize
    passes: float = 10
    """Passes over all blocks that the rounds would make if no candidate were refused."""
    workers: int = 2
    """Number of real processes."""
    transports: tuple[str, ...] = ("shared_memory", "sockets")
    repeats: int = 3
    simulated_workers: int = 8


class SolverPoint(NamedTuple):
    """Progress of a run after some rounds."""

    rounds: int
    updates: int
    seconds: float
    """Seconds spent in rounds, scheduling included; computing the objective is not."""
    objective: float


@dataclass(frozen=True, kw_only=True)
class SolverRun:
    """A problem solved with one scheduling policy, on one transport."""

    problem: ProblemName
    policy: str
    transport: str
    workers: int
    rounds: int
    num_blocks: int
    seconds: tuple[float, ...]
    """Total seconds of every repetition, sorted."""
    points: tuple[SolverPoint, ...]
    """Progress of the repetition with the median time; empty if it diverged."""

    @property
    def diverged(self) -> bool:
        """Whether the objective ended higher than it began, or not at all."""
        return not self.points or self.points[-1].objective > self.points[0].objective

    @property
    def where(self) -> str:
        """Workers and transport, in words."""
        if self.transport == SIMULATED:
            return f"{self.workers} simulated workers"
        return f"{self.workers} processes, {self.transport.replace('_', ' ')}"

    def first_at(self, objective: float) -> SolverPoint | None:
        """Return the first point at or below an objective, if any."""
        return next((point for point in self.points if point.objective <= objective), None)


@dataclass(frozen=True, kw_only=True)
class LoadBalance:
    """Virtual time of the same rounds of matrix factorisation, with one rule of distributing rows to workers."""

    slow_worker: bool
    by_work: bool
    """Whether rows are distributed by their amount of work, or by their number."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StradsResults:
    """All measurements."""

    machine: str
    quick: bool
    link: str
    """Link of every simulated host."""
    flops: float
    """Operations per second of a simulated worker."""
    slowdown: float
    """How many times as long the slow worker computes, where there is one."""
    config: StradsConfig
    lasso_penalty: float
    runs: tuple[SolverRun, ...]
    balance: tuple[LoadBalance, ...]

    def round_robin(self, run: SolverRun) -> SolverRun:
        """Return the round-robin run of the same problem in the same place."""
        key = run.problem, run.transport, run.workers
        same = (other for other in self.runs if (other.problem, other.transport, other.workers) == key)
        return next(other for other in same if other.policy == "round-robin")

    def speed_up(self, run: SolverRun) -> float | None:
        """Return how many times as fast as round-robin a run reached round-robin's final objective; None if never."""
        last = self.round_robin(run).points[-1]
        point = run.first_at(last.objective)
        return None if point is None or not point.seconds else last.seconds / point.seconds
