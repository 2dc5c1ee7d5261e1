"""Strads (Lee et al. 2014, Kim et al. 2016; in Kim 2016): which parameters to update next, by a scheduler.

Lasso by coordinate descent and matrix factorisation, in several orders: by real processes, and on a simulated cluster.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch

from reproductions.context import ReproductionContext, machine
from reproductions.strads.problems import LassoSize, MatrixSize
from reproductions.strads.report import write_report
from tutti.cluster import Cluster, Compute, Link
from tutti.errors import ConfigError
from tutti.launch import init, launch
from tutti.parallel.scheduler import Dynamic, Order, Random, RoundRobin, Scheduler, solve
from tutti.simulation.runs.simulate import simulate

LINK = Link("1gbit", "50us")
FLOPS = 1e10
SLOW = 3.0
"""How many times as long the slow worker takes, where there is one."""


@dataclass(frozen=True)
class Way:
    """How blocks are picked."""

    name: str
    order: Order
    limit: float = 0.3


IN_TURN = Way("round-robin", RoundRobin())
WAYS = (IN_TURN, Way("random", Random()), Way("dynamic", Dynamic()))
UNCHECKED = (Way("round-robin, unchecked", RoundRobin(), limit=1.0), Way("dynamic, unchecked", Dynamic(), limit=1.0))
"""Without a look at what depends on what."""
GREEDY = Way("dynamic, greedy", Dynamic(greedy=True))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem, in one way."""

    what: str
    size: LassoSize | MatrixSize
    way: Way
    passes: float
    per_round: int

    @property
    def rounds(self) -> int:
        return round(self.passes * self.size.num_blocks / self.per_round)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much to do."""

    lasso: LassoSize
    matrix: MatrixSize
    passes: float = 10
    workers: int = 2
    """Real ones."""
    transports: tuple[str, ...] = ("shared_memory", "process_group")
    repeats: int = 3
    simulated: int = 8


PLAN = Plan(
    lasso=LassoSize(samples=2000, features=10_000, relevant=100),
    matrix=MatrixSize(rows=2000, columns=1000, entries=60_000),
)
QUICK = Plan(
    lasso=LassoSize(samples=200, features=500, relevant=10),
    matrix=MatrixSize(rows=200, columns=150, entries=4000, rank=3),
    transports=("shared_memory",),
    repeats=1,
    simulated=2,
)


def reproduce(context: ReproductionContext) -> str:
    """Do all of it; the report, in Markdown."""
    plan = QUICK if context.quick else PLAN
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return conclude(plan, list(real(plan, context)), context)
    finally:
        torch.set_num_threads(num_threads)


def conclude(plan: Plan, rows: list[dict[str, Any]], context: ReproductionContext) -> str:
    """Simulate, and write down all of it, with what processes have done; the report."""
    rows = [*rows, *_simulated(plan, context)]
    loads = list(_balance(plan, context))
    about = {"machine": machine(), "quick": context.quick, "link": str(LINK), "flops": FLOPS, "slow": SLOW}
    result = {**about, "plan": asdict(plan), "penalty": plan.lasso.penalty, "rows": rows, "loads": loads}
    lines = json.dumps(result).replace('{"what"', '\n{"what"')
    (context.folder / "results.json").write_text(lines + "\n")
    return write_report(result, context.folder)


def cases(plan: Plan, lasso_ways: tuple[Way, ...]) -> list[Case]:
    """Both problems in every way."""
    lasso = [Case(what="lasso", size=plan.lasso, way=way, passes=plan.passes, per_round=32) for way in lasso_ways]
    matrix = [
        Case(what="matrix", size=plan.matrix, way=way, passes=plan.passes, per_round=64) for way in (*WAYS, GREEDY)
    ]
    return lasso + matrix


def real(plan: Plan, context: ReproductionContext) -> Iterator[dict[str, Any]]:
    """By processes of this machine: every case several times, in turns."""
    for transport in plan.transports:
        context.progress(f"{plan.workers} processes, {transport}")
        todo = cases(plan, WAYS)
        runs = launch(work, todo * plan.repeats, workers=plan.workers, transport=transport)[0]
        for number, case in enumerate(todo):
            yield _row(case, plan.workers, transport, runs[number :: len(todo)])


def _simulated(plan: Plan, context: ReproductionContext) -> Iterator[dict[str, Any]]:
    cluster = Cluster(link=LINK, compute=Compute(FLOPS))
    for case in cases(plan, (*WAYS, *UNCHECKED)):
        context.progress(f"{plan.simulated} simulated workers, {case.what}, {case.way.name}")
        runs = simulate(work, [case], workers=plan.simulated, cluster=cluster).results[0]
        yield _row(case, plan.simulated, "simulated", runs)


def _balance(plan: Plan, context: ReproductionContext) -> Iterator[dict[str, Any]]:
    """Virtual seconds of the same rounds with rows given out by work and by number, to equal and unequal workers."""
    for slow in ({}, {0: SLOW}):
        cluster = Cluster(link=LINK, compute=Compute(FLOPS / 100), slow=slow)
        for by_load in (True, False):
            size = replace(plan.matrix, by_load=by_load)
            case = Case(what="matrix", size=size, way=IN_TURN, passes=2, per_round=64)
            context.progress(
                f"matrix, {'one slow worker' if slow else 'equal workers'}, by {'work' if by_load else 'number'}"
            )
            points = simulate(work, [case], workers=plan.simulated, cluster=cluster).results[0][0]
            yield {"slow": bool(slow), "by_load": by_load, "seconds": points[-1][2]}


def work(todo: list[Case]) -> list[list[list[float]]]:
    """Solve on this rank's part; of every case, rounds, updates, seconds and objective as it went."""
    world = init()
    torch.set_num_threads(1)
    done = []
    for case in todo:
        problem = case.size.problem(world.transport)
        scheduler = Scheduler(order=case.way.order, limit=case.way.limit, per_round=case.per_round)
        try:
            points = solve(problem, world.transport, scheduler, rounds=case.rounds).points
        except ConfigError:  # It diverged, on all ranks.
            points = []
        done.append([[point.rounds, point.updates, round(point.seconds, 5), point.objective] for point in points])
    return done


def _row(case: Case, workers: int, where: str, runs: list[list[list[float]]]) -> dict[str, Any]:
    """Of several runs of a case, the one whose time is in the middle."""
    times = sorted(points[-1][2] if points else 0.0 for points in runs)
    typical = median(times) if len(times) % 2 else times[0]
    points = next(points for points in runs if (points[-1][2] if points else 0.0) == typical)
    about = {"what": case.what, "way": case.way.name, "where": where, "workers": workers, "rounds": case.rounds}
    return {**about, "blocks": case.size.num_blocks, "seconds": times, "points": points}
