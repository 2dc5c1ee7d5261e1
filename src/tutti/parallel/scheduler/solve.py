"""The rounds of a scheduled solution: schedule, push, pull, until it is good enough."""

import math
import zlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tutti.errors import ConfigError, ReplicaMismatch
from tutti.parallel.scheduler.choose import balance_loads, select_independent
from tutti.parallel.scheduler.problem import BlockProblem
from tutti.parallel.scheduler.selection import BlockSelector, Dynamic, SelectionRule
from tutti.parallel.scheduler.sums import sum_function
from tutti.transports import Transport

_LEARN = 0.05
"""How much of what one round shows about ranks' relative_times is believed."""


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """How blocks are picked for a round.

    Args:
        selection: which blocks come first: `Dynamic()`, `RoundRobin()` or `Random()`.
        per_round: how many blocks are updated at once, at most.
        limit: blocks that depend on each other by more than this, from 0 to 1, are not updated in one round. 1 lets
            any be.
        seed: of what is drawn.
    """

    selection: SelectionRule = field(default_factory=Dynamic)
    per_round: int = 32
    limit: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        mistakes = []
        if not isinstance(self.selection, SelectionRule):
            mistakes.append(f"selection must be an object such as Dynamic(), got {self.selection!r}")
        if self.per_round < 1:
            mistakes.append(f"per_round must be 1 or more, got {self.per_round}")
        if not 0 <= self.limit <= 1:
            mistakes.append(f"limit must be from 0 to 1, got {self.limit}")
        if mistakes:
            raise ConfigError(f"Scheduler: {'; '.join(mistakes)}.")


@dataclass(frozen=True)
class ProgressPoint:
    """How far a solution was, and when."""

    rounds: int
    updates: int
    """Of blocks."""
    seconds: float
    """Since the start, without those in which the objective was computed."""
    objective: float


@dataclass(frozen=True)
class Solution:
    """How it went, the same on every rank but for the seconds."""

    points: list[ProgressPoint]
    reached: bool
    """Whether the target was."""

    @property
    def objective(self) -> float:
        return self.points[-1].objective


def solve(
    problem: BlockProblem,
    transport: Transport,
    scheduler: Scheduler | None = None,
    *,
    rounds: int,
    target: float = -math.inf,
    report_every: int = 10,
) -> Solution:
    """Update blocks of `problem` for so many rounds, or until its objective is at `target`. Collective.

    Every rank schedules for itself and comes to the same, so nothing is sent but what ranks push: one sum a round.
    """
    if rounds < 0 or report_every < 1:
        raise ConfigError(
            f"solve needs rounds of 0 or more and report_every of 1 or more, got {rounds}, {report_every}."
        )
    worker = _RoundRunner(problem, transport, scheduler or Scheduler())
    points = [worker.point()]
    while worker.rounds < rounds and points[-1].objective > target:
        for _ in range(min(report_every, rounds - worker.rounds)):
            worker.round()
        points.append(worker.point())
    return Solution(points, points[-1].objective <= target)


class _RoundRunner:
    """This rank's part of the rounds."""

    def __init__(self, problem: BlockProblem, transport: Transport, scheduler: Scheduler) -> None:
        self._problem = problem
        self._transport = transport
        self._scheduler = scheduler
        self._selector: BlockSelector = scheduler.selection.start(problem.num_blocks, scheduler.seed)
        self._sum = sum_function(transport)
        self._relative_times = torch.ones(transport.size, dtype=torch.float64)
        """How long ranks take for a load, of late, beside each other."""
        self.rounds = self.updates = 0
        self._seconds = 0.0

    def round(self) -> None:
        """Schedule, push, pull."""
        start_s = self._transport.now()
        blocks, loads = self._schedule()
        shares = [range(len(blocks))] if loads is None else balance_loads(loads.tolist(), self._relative_times.numpy())
        mine = torch.tensor(shares[self._transport.rank % len(shares)], dtype=torch.int64)
        push_s = self._transport.now()
        pushed = self._problem.push(blocks, mine)
        self._pass_time(self._problem.operations(blocks, mine))
        pace = 0.0 if loads is None or not len(mine) else (self._transport.now() - push_s) / float(loads[mine].sum())
        results = self._summed(blocks, pushed, pace)
        changes = self._problem.pull(blocks, results)
        self._selector.mark_updated(blocks.tolist())
        if self._selector.uses_urgency:
            urgent, amounts = self._problem.urgency_increments(blocks, changes)
            self._selector.raise_urgency(urgent.numpy(), amounts.numpy())
        self.rounds += 1
        self.updates += len(blocks)
        self._seconds += self._transport.now() - start_s

    def point(self) -> ProgressPoint:
        objective = self._problem.objective().detach().to(torch.float64).reshape(1).clone()
        self._sum(objective)
        value = float(objective)
        if not math.isfinite(value):
            raise ConfigError(
                f"rank {self._transport.rank}: the objective is {value} after {self.rounds} rounds. Blocks that depend "
                "on each other were updated at once, perhaps: lower the scheduler's limit, or per_round."
            )
        return ProgressPoint(self.rounds, self.updates, self._seconds, value)

    def _schedule(self) -> tuple[Tensor, Tensor | None]:
        """The blocks of this round, and how much work each is."""
        per_round, limit = self._scheduler.per_round, self._scheduler.limit
        operations = self._scheduler.selection.operations(self._problem.num_blocks)
        if limit < 1:
            candidates = torch.tensor(self._selector.candidates(2 * per_round))
            operations += len(candidates) ** 2 * self._problem.pair_operations
            blocks = candidates[select_independent(self._problem.dependence(candidates).numpy(), limit, per_round)]
        else:
            blocks = torch.tensor(self._selector.candidates(per_round))
        self._pass_time(operations)
        return blocks, self._problem.loads(blocks)

    def _summed(self, blocks: Tensor, pushed: Tensor, pace: float) -> Tensor:
        """What all ranks pushed. With it go a sign of what each has scheduled, and its pace."""
        rank, size = self._transport.rank, self._transport.size
        if pushed.shape != (len(blocks), self._problem.width):
            raise ConfigError(
                f"rank {rank}: push gave a tensor of {tuple(pushed.shape)} for {len(blocks)} blocks of width "
                f"{self._problem.width}; it must have a row for each."
            )
        sign = float(zlib.crc32(blocks.numpy().tobytes()))
        sent = torch.zeros(pushed.numel() + 1 + size, dtype=torch.float64)
        sent[: pushed.numel()] = pushed.detach().reshape(-1)
        sent[pushed.numel()] = sign
        sent[pushed.numel() + 1 + rank] = pace
        self._sum(sent)
        if sent[pushed.numel()] != sign * size:
            raise ReplicaMismatch(
                f"rank {rank}: ranks picked different blocks in round {self.rounds}. What dependence, loads and urgent "
                "return must be the same on every rank, to the bit."
            )
        self._follow(sent[pushed.numel() + 1 :])
        return sent[: pushed.numel()].view(pushed.shape).to(pushed.dtype)

    def _follow(self, relative_times: Tensor) -> None:
        """Ranks that have just shown how fast they are get more or less to do, in time."""
        if (relative_times > 0).all():
            self._relative_times += _LEARN * (relative_times / relative_times.mean() - self._relative_times)

    def _pass_time(self, operations: float) -> None:
        if (cluster := self._transport.cluster) is not None:
            self._transport.elapse(operations / cluster.compute.flops)
