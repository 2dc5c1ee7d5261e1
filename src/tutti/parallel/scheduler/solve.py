"""`solve`: rounds of schedule, push and pull, until the objective reaches its target.

How it works
------------
There is no scheduling rank. Every rank holds all parameters and runs the same scheduler with the same seed, so all
choose the same blocks without a message. A round has three parts:

1. Schedule: the selection rule proposes candidates; those that depend on an earlier candidate are rejected; the rest is
   divided between ranks by work, if the problem states any.
2. Push: each rank computes its part of the update, and all parts are summed over ranks. This sum is the only
   communication of a round, and the only wait. It is collective: if a rank is lost or raises an error, the transport
   ends the others' wait with `RankLost`.
3. Pull: every rank applies the same sum to its parameters, and learns which blocks became urgent.

The invariant is that all ranks have the same bits: of parameters, urgencies and measured speeds. The sum guarantees it
for what it carries (`sums`), and so three things travel in it: the results, the time that each rank took, and a
checksum of the chosen blocks. If ranks chose differently, the sum of the checksums shows it, on every rank, in the
round in which it happens.
"""

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

_SPEED_WEIGHT = 0.05
"""Weight of one round in the moving average of the ranks' relative times."""


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """Settings of the choice of blocks in each round.

    Args:
        selection: which blocks come first: `Dynamic()`, `RoundRobin()` or `Random()`.
        per_round: largest number of blocks that are updated at once.
        limit: blocks that depend on each other by more than this, from 0 to 1, are not updated in one round. 1 turns
            the check off.
        seed: seed of random choices, the same on every rank.
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
    """The progress of a solution at one moment."""

    rounds: int
    """Number of rounds so far."""
    updates: int
    """Number of updates of blocks so far."""
    seconds: float
    """Seconds since the start, without those in which the objective was computed."""
    objective: float
    """The objective, summed over ranks."""


@dataclass(frozen=True)
class Solution:
    """The progress of a solution, the same on every rank except for the seconds."""

    points: list[ProgressPoint]
    """Progress at the start, every `report_every` rounds, and at the end."""
    reached: bool
    """Whether the objective reached its target."""

    @property
    def objective(self) -> float:
        """The objective at the end."""
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
    """Update blocks of `problem` for `rounds` rounds, or until its objective is at most `target`. Collective.

    Every rank computes the same schedule by itself, so the only communication is one sum per round.

    Args:
        report_every: rounds between two computations of the objective.
    """
    if rounds < 0 or report_every < 1:
        raise ConfigError(
            f"solve needs rounds of 0 or more and report_every of 1 or more, got {rounds}, {report_every}."
        )
    runner = _RoundRunner(problem, transport, scheduler or Scheduler())
    points = [runner.point()]
    # The objective is a collective sum over all data, so it is computed between groups of rounds only.
    while runner.rounds < rounds and points[-1].objective > target:
        for _ in range(min(report_every, rounds - runner.rounds)):
            runner.round()
        points.append(runner.point())
    return Solution(points, points[-1].objective <= target)


class _RoundRunner:
    """Runs the rounds on this rank."""

    def __init__(self, problem: BlockProblem, transport: Transport, scheduler: Scheduler) -> None:
        self._problem = problem
        self._transport = transport
        self._scheduler = scheduler
        # One on each rank, from one seed. Nothing that differs between ranks (time, memory, a rank's data) may reach
        # it.
        self._selector: BlockSelector = scheduler.selection.start(problem.num_blocks, scheduler.seed)
        self._sum = sum_function(transport)
        self._relative_times = torch.ones(transport.size, dtype=torch.float64)
        """Moving average of the time that each rank takes for a unit of load, relative to the mean of all ranks."""
        self.rounds = self.updates = 0
        self._seconds = 0.0

    def round(self) -> None:
        """Schedule, push and pull once."""
        start_s = self._transport.now()  # `point`, which computes the objective, is not timed.
        blocks, loads = self._schedule()
        # Without loads, every rank computes its part of all blocks. With them, all ranks compute the same assignment,
        # since loads and relative times have the same bits everywhere.
        shares = [range(len(blocks))] if loads is None else balance_loads(loads.tolist(), self._relative_times.numpy())
        mine = torch.tensor(shares[self._transport.rank % len(shares)], dtype=torch.int64)
        push_s = self._transport.now()
        pushed = self._problem.push(blocks, mine)
        self._elapse(self._problem.operations(blocks, mine))
        # Measured before the sum: the wait for slower ranks is not this rank's speed.
        took_s = self._transport.now() - push_s
        load_s = 0.0 if loads is None or not len(mine) else took_s / float(loads[mine].sum())
        results = self._sum_results(blocks, pushed, load_s)
        changes = self._problem.pull(blocks, results)
        # After the pull, and from summed values only: all ranks pass on the same bits.
        self._selector.mark_updated(blocks.tolist())
        if self._selector.uses_urgency:
            urgent, increments = self._problem.urgency_increments(blocks, changes)
            self._selector.raise_urgency(urgent.numpy(), increments.numpy())
        self.rounds += 1
        self.updates += len(blocks)
        self._seconds += self._transport.now() - start_s

    def point(self) -> ProgressPoint:
        """Return the present progress. Collective. Raises `ConfigError` on all ranks if the objective diverged."""
        # Each rank's part of it; the sum is the same on all ranks, so all stop in the same round.
        objective = self._problem.objective().detach().to(torch.float64).reshape(1).clone()
        self._sum(objective)
        value = float(objective)
        if not math.isfinite(value):
            raise ConfigError(
                f"rank {self._transport.world_rank}: the objective is {value} after {self.rounds} rounds. Perhaps "
                "blocks that depend on each other were updated at once: lower the scheduler's limit, or per_round."
            )
        return ProgressPoint(self.rounds, self.updates, self._seconds, value)

    def _schedule(self) -> tuple[Tensor, Tensor | None]:
        """Return the blocks of this round, and the work of each."""
        per_round, limit = self._scheduler.per_round, self._scheduler.limit
        operations = self._scheduler.selection.operations(self._problem.num_blocks)
        if limit < 1:
            # Twice as many candidates as needed, since some of them will be rejected.
            candidates = torch.tensor(self._selector.candidates(2 * per_round))
            operations += len(candidates) ** 2 * self._problem.pair_operations
            blocks = candidates[select_independent(self._problem.dependence(candidates).numpy(), limit, per_round)]
        else:
            blocks = torch.tensor(self._selector.candidates(per_round))
        self._elapse(operations)
        return blocks, self._problem.loads(blocks)

    def _sum_results(self, blocks: Tensor, pushed: Tensor, load_s: float) -> Tensor:
        """Return the sum of what all ranks pushed; check that all chose these blocks, and note their speeds.

        The summed vector has the results, a checksum of the blocks, and one place per rank for its time per load.
        """
        rank, size = self._transport.rank, self._transport.size
        if pushed.shape != (len(blocks), self._problem.width):
            raise ConfigError(
                f"rank {self._transport.world_rank}: push gave a tensor of {tuple(pushed.shape)} for {len(blocks)} "
                f"blocks of width {self._problem.width}; it must return one row of {self._problem.width} values per "
                "block."
            )
        # A CRC has 32 bits: it and its multiples are exact in float64.
        checksum = float(zlib.crc32(blocks.numpy().tobytes()))
        summed = torch.zeros(pushed.numel() + 1 + size, dtype=torch.float64)
        summed[: pushed.numel()] = pushed.detach().reshape(-1)
        summed[pushed.numel()] = checksum
        summed[pushed.numel() + 1 + rank] = load_s
        self._sum(summed)
        # Checked before anything is applied, so that a mismatch leaves the parameters of all ranks as they were.
        if summed[pushed.numel()] != checksum * size:
            raise ReplicaMismatch(
                f"rank {self._transport.world_rank}: ranks picked different blocks in round {self.rounds}. The results "
                "of dependence, loads and urgency_increments must be the same on every rank, to the bit."
            )
        self._update_speeds(summed[pushed.numel() + 1 :])
        return summed[: pushed.numel()].view(pushed.shape).to(pushed.dtype)

    def _update_speeds(self, load_times_s: Tensor) -> None:
        """Average the times of this round into the relative times, unless a rank had no load to measure."""
        # A rank without load sent 0, which is no speed. All ranks see that in the sum, and all skip the round.
        if (load_times_s > 0).all():
            self._relative_times += _SPEED_WEIGHT * (load_times_s / load_times_s.mean() - self._relative_times)

    def _elapse(self, operations: float) -> None:
        """Let the time of some operations pass on a virtual clock."""
        if (cluster := self._transport.cluster) is not None:
            self._transport.elapse(operations / cluster.compute.flops)
