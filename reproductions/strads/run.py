"""STRADS (Lee et al. 2014, Kim et al. 2016; in Kim 2016): a scheduler decides which parameters to update next.

Lasso by coordinate descent and matrix factorisation are solved with several scheduling policies: by real processes,
and on a simulated cluster.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median

import torch

from reproductions.context import ReproductionContext, machine
from reproductions.records import save
from reproductions.strads.problems import LassoSize, MatrixSize
from reproductions.strads.report import write_report
from reproductions.strads.results import (
    SIMULATED,
    LoadBalance,
    ProblemName,
    SolverPoint,
    SolverRun,
    StradsConfig,
    StradsResults,
)
from tutti.cluster import Cluster, Compute, Link
from tutti.errors import ConfigError
from tutti.launch import init, launch
from tutti.parallel.scheduler import Dynamic, Random, RoundRobin, Scheduler, SelectionRule, solve
from tutti.simulation.runs.simulate import simulate

LINK = Link("1gbit", "50us")
FLOPS = 1e10
SLOWDOWN = 3.0
"""How many times as long the slow worker computes, where there is one."""


@dataclass(frozen=True)
class SchedulingPolicy:
    """How the blocks of a round are chosen."""

    name: str
    selection: SelectionRule
    limit: float = 0.3
    """Largest dependence allowed between two blocks of a round; 1 allows any."""


IN_TURN = SchedulingPolicy("round-robin", RoundRobin())
POLICIES = (IN_TURN, SchedulingPolicy("random", Random()), SchedulingPolicy("dynamic", Dynamic()))
UNCHECKED = (
    SchedulingPolicy("round-robin, unchecked", RoundRobin(), limit=1.0),
    SchedulingPolicy("dynamic, unchecked", Dynamic(), limit=1.0),
)
"""Policies that ignore dependences."""
GREEDY = SchedulingPolicy("dynamic, greedy", Dynamic(greedy=True))


@dataclass(frozen=True, kw_only=True)
class SolverTask:
    """A problem to solve with one scheduling policy."""

    problem: ProblemName
    size: LassoSize | MatrixSize
    policy: SchedulingPolicy
    passes: float
    per_round: int
    """Number of blocks updated per round."""

    @property
    def rounds(self) -> int:
        """Rounds in which all passes could be made if no candidate were refused."""
        return round(self.passes * self.size.num_blocks / self.per_round)


FULL = StradsConfig(
    lasso=LassoSize(samples=2000, features=10_000, relevant=100),
    matrix=MatrixSize(rows=2000, columns=1000, entries=60_000),
)
QUICK = StradsConfig(
    lasso=LassoSize(samples=200, features=500, relevant=10),
    matrix=MatrixSize(rows=200, columns=150, entries=4000, rank=3),
    transports=("shared_memory",),
    repeats=1,
    simulated_workers=2,
)


def reproduce(context: ReproductionContext) -> str:
    """Solve everything, and write results, figures and report; return the report."""
    config = QUICK if context.quick else FULL
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results = StradsResults(
            machine=machine(),
            quick=context.quick,
            link=str(LINK),
            flops=FLOPS,
            slowdown=SLOWDOWN,
            config=config,
            lasso_penalty=config.lasso.penalty,
            runs=(*_real_runs(config, context), *_simulated_runs(config, context)),
            balance=tuple(_balance(config, context)),
        )
    finally:
        torch.set_num_threads(num_threads)
    save(results, context.folder / "results.json")
    return write_report(results, context.folder)


def _tasks(config: StradsConfig, lasso_policies: tuple[SchedulingPolicy, ...]) -> list[SolverTask]:
    lasso = [
        SolverTask(problem="lasso", size=config.lasso, policy=policy, passes=config.passes, per_round=32)
        for policy in lasso_policies
    ]
    matrix = [
        SolverTask(problem="matrix", size=config.matrix, policy=policy, passes=config.passes, per_round=64)
        for policy in (*POLICIES, GREEDY)
    ]
    return lasso + matrix


def _real_runs(config: StradsConfig, context: ReproductionContext) -> Iterator[SolverRun]:
    """Solve with processes of this machine; the repetitions of the tasks are interleaved."""
    for transport in config.transports:
        context.progress(f"{config.workers} processes, {transport}")
        tasks = _tasks(config, POLICIES)
        runs = launch(solve_each, tasks * config.repeats, workers=config.workers, transport=transport)[0]
        for number, task in enumerate(tasks):
            yield _median_run(task, config.workers, transport, runs[number :: len(tasks)])


def _simulated_runs(config: StradsConfig, context: ReproductionContext) -> Iterator[SolverRun]:
    cluster, workers = Cluster(link=LINK, compute=Compute(FLOPS)), config.simulated_workers
    for task in _tasks(config, (*POLICIES, *UNCHECKED)):
        context.progress(f"{workers} simulated workers, {task.problem}, {task.policy.name}")
        runs = simulate(solve_each, [task], workers=workers, cluster=cluster).results[0]
        yield _median_run(task, workers, SIMULATED, runs)


def _balance(config: StradsConfig, context: ReproductionContext) -> Iterator[LoadBalance]:
    """Simulate the same rounds with rows distributed by work and by number, to equal and to unequal workers.

    Workers are a hundred times slower than in the other simulations, so that computation dominates.
    """
    for slow in ({}, {0: SLOWDOWN}):
        cluster = Cluster(link=LINK, compute=Compute(FLOPS / 100), slow=slow)
        for by_work in (True, False):
            size = replace(config.matrix, balanced=by_work)
            task = SolverTask(problem="matrix", size=size, policy=IN_TURN, passes=2, per_round=64)
            workers_text = "one slow worker" if slow else "equal workers"
            context.progress(f"matrix, {workers_text}, rows by {'work' if by_work else 'number'}")
            points = simulate(solve_each, [task], workers=config.simulated_workers, cluster=cluster).results[0][0]
            yield LoadBalance(slow_worker=bool(slow), by_work=by_work, seconds=points[-1].seconds)


def solve_each(tasks: list[SolverTask]) -> list[list[SolverPoint]]:
    """Solve every task together with the other ranks; return its progress, or nothing if it diverged."""
    world = init()
    torch.set_num_threads(1)
    done = []
    for task in tasks:
        problem = task.size.problem(world.transport)
        scheduler = Scheduler(selection=task.policy.selection, limit=task.policy.limit, per_round=task.per_round)
        try:
            points = solve(problem, world.transport, scheduler, rounds=task.rounds).points
        except ConfigError:  # The solver raises this on all ranks when the objective diverges.
            points = []
        done.append([SolverPoint(p.rounds, p.updates, round(p.seconds, 5), p.objective) for p in points])
    return done


def _median_run(task: SolverTask, workers: int, transport: str, runs: list[list[SolverPoint]]) -> SolverRun:
    """Return the repetition with the median time; of an even number, the fastest."""
    times = sorted(_total_s(points) for points in runs)
    typical = median(times) if len(times) % 2 else times[0]
    return SolverRun(
        problem=task.problem,
        policy=task.policy.name,
        transport=transport,
        workers=workers,
        rounds=task.rounds,
        num_blocks=task.size.num_blocks,
        seconds=tuple(times),
        points=tuple(next(points for points in runs if _total_s(points) == typical)),
    )


def _total_s(points: list[SolverPoint]) -> float:
    return points[-1].seconds if points else 0.0
