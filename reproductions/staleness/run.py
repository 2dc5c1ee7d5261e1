"""Dong and Kim (2016): how far workers may drift apart, and what that gains and costs.

Parameter servers in virtual time with real gradients: lockstep, bounded staleness, soft synchronisation and none, on
clusters whose workers are even, have one that is slow, or pause at random.
"""

import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from reproductions.context import ReproductionContext, machine
from reproductions.staleness.report import write_report
from reproductions.subsets import endless_batches, local_accuracy, subset
from tutti.cluster import Cluster, Compute, Jitter, Link, Pauses
from tutti.job import distribute
from tutti.launch import init
from tutti.recipes import recipe
from tutti.simulation.runs.simulate import simulate
from tutti.strategies import ParameterServer, parse

STEP_S = 0.040
"""What a worker computes in a step, whatever its batch."""
LINK = Link("10gbit", "50us")
JITTER = Jitter(0.05)
SLOW = 2.0
PAUSES = Pauses(20 * STEP_S, 3 * STEP_S)


def num_servers(workers: int) -> int:
    """One for every eight workers: ranks that only serve."""
    return -(-workers // 8)


@dataclass(frozen=True)
class Rule:
    """A consistency, and the learning rate that goes with it."""

    name: str
    text: str
    """Of the strategy; {half} is half of the workers."""
    whole_rate: bool = False
    """The recipe's learning rate for every step of the servers, however few updates make it."""

    def strategy(self, workers: int) -> str:
        return f"ps:{self.text.format(half=workers // 2)},servers={num_servers(workers)},overlap=0"


RULES = (
    Rule("BSP", "bsp"),
    Rule("SSP 1", "ssp=1"),
    Rule("SSP 3", "ssp=3"),
    Rule("SSP 10", "ssp=10"),
    Rule("SSP 3, eager", "ssp=3,eager"),
    Rule("soft-sync N/2", "softsync={half}"),
    Rule("async, rate / N", "async"),
    Rule("async, whole rate", "async", whole_rate=True),
    Rule("async, aware", "async,aware", whole_rate=True),
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A recipe, cut down to what there is time for, and where it is trained."""

    name: str
    recipe: str
    batch: int
    """Over all workers together."""
    num_train: int
    num_test: int
    epochs: int
    rate: float
    """The learning rate of a step that is made of an update of every worker."""
    momentum: float = 0.0
    tests: int = 3
    """In an epoch."""
    workers: tuple[int, ...] = (8, 32)
    clusters: tuple[str, ...] = ("even", "one slow", "pauses")
    rules: tuple[Rule, ...] = RULES


MNIST = Part(name="mnist-mlp", recipe="mnist-mlp", batch=128, num_train=2560, num_test=2000, epochs=4, rate=0.05)
MOMENTUM = replace(MNIST, name="mnist-mlp, momentum 0.9", momentum=0.9, workers=(8,), clusters=("even",))
CIFAR = Part(
    name="cifar-quick", recipe="cifar-quick", batch=32, num_train=1280, num_test=500, epochs=4, rate=0.05, tests=2,
    workers=(8,),
)  # fmt: skip
CIFAR_32 = replace(CIFAR, workers=(32,), clusters=("one slow",))
PLAN = (MNIST, MOMENTUM, CIFAR, CIFAR_32)
QUICK = (
    Part(
        name="digits", recipe="digits", batch=64, num_train=640, num_test=200, epochs=2, rate=0.1,
        workers=(4,), clusters=("one slow",),
        rules=tuple(rule for rule in RULES if rule.name in ("BSP", "SSP 3", "async, rate / N")),
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Run:
    """What every rank is told."""

    part: Part
    rule: Rule
    batch: int
    """Of a worker."""
    data: Path | None


def cluster_named(name: str, workers: int, batch: int) -> Cluster:
    """One of the three: workers that are even, but for a little jitter; the last of them slow; pauses at random."""
    return Cluster(
        name=name,
        link=LINK,
        compute=Compute(sample_s=STEP_S / batch),
        jitter=JITTER,
        slow={workers - 1: SLOW} if name == "one slow" else {},
        pauses=PAUSES if name == "pauses" else None,
    )


def reproduce(context: ReproductionContext) -> str:
    """Do all of it; the report, in Markdown."""
    plan = QUICK if context.quick else PLAN
    for part in plan:
        recipe(part.recipe).data(context.data)  # A missing file is better said before the work than in it.
    cells = [
        (part, size, name, rule)
        for part in plan
        for size in part.workers
        for name in part.clusters
        for rule in part.rules
    ]
    runs: list[dict[str, Any]] = []
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # Servers take many small steps, and two threads would mostly wait for each other.
    try:
        for part, workers, name, rule in cells:
            runs.append(one(part, workers, name, rule, context.data))
            done = f"{runs[-1]['accuracy']:.1%} in {runs[-1]['seconds']:.1f} virtual s"
            what = f"{part.name}, {workers} workers, {name}, {rule.name}"
            context.progress(f"{len(runs)} of {len(cells)}: {what}: {done}")
    finally:
        torch.set_num_threads(num_threads)
    return conclude(plan, runs, context)


def conclude(plan: tuple[Part, ...], runs: list[dict[str, Any]], context: ReproductionContext) -> str:
    """Write down what was measured; the report."""
    about = {"machine": machine(), "quick": context.quick, "step_s": STEP_S, "link": str(LINK)}
    uneven = {"jitter": JITTER.spread, "pause_every_s": PAUSES.every_s, "pause_s": PAUSES.length_s, "slow": SLOW}
    result = {**about, **uneven, "plan": [asdict(part) for part in plan], "runs": runs}
    lines = json.dumps(result).replace('{"name"', '\n{"name"').replace('{"part"', '\n{"part"')
    (context.folder / "results.json").write_text(lines + "\n")
    return write_report(result, context.folder)


def one(part: Part, workers: int, name: str, rule: Rule, data: Path | None) -> dict[str, Any]:
    """Train once in virtual time, and how it went."""
    batch = part.batch // workers
    run = Run(part=part, rule=rule, batch=batch, data=data)
    ranks, cluster = workers + num_servers(workers), cluster_named(name, workers, batch)
    simulation = simulate(_train, run, workers, workers=ranks, cluster=cluster)
    staleness: Counter[int] = Counter()
    for outcome in simulation.results[:workers]:
        staleness.update(outcome["staleness"])
    first = simulation.results[0]
    times = [(rank.busy_s, rank.communicating_s + rank.waiting_s) for rank in simulation.ranks[:workers]]
    busy = sum(busy_s / (busy_s + idle_s) for busy_s, idle_s in times) / workers
    return {
        "part": part.name, "workers": workers, "cluster": name, "rule": rule.name,
        "strategy": rule.strategy(workers), "batch": batch, "learning_rate": first["learning_rate"],
        "accuracy": first["accuracy"], "epochs": first["epochs"], "seconds": first["seconds"],
        "epoch_s": first["seconds"] / first["epochs"], "busy": round(busy, 4),
        "staleness": {str(number): count for number, count in sorted(staleness.items())}, "points": first["points"],
    }  # fmt: skip


def _train(run: Run, workers: int) -> dict[str, Any]:
    """Train on this rank until the servers have had so many epochs' worth of samples from all."""
    world, made = init(), recipe(run.part.recipe)
    torch.manual_seed(0)
    model = made.model()
    optimizer = made.optimizer(model)
    strategy = parse(run.rule.strategy(workers))
    assert isinstance(strategy, ParameterServer)
    clocked = strategy.consistency.bound is not None
    in_step = workers if clocked else strategy.consistency.quorum
    for group in optimizer.param_groups:
        group["lr"] = run.part.rate * (1 if run.rule.whole_rate else in_step / workers)
        group["momentum"] = run.part.momentum
    train, test = subset(run.part.recipe, run.part.num_train, run.part.num_test, run.data)
    epoch_steps = len(train) // (run.batch * workers)
    points: list[tuple[float, float, float]] = []
    tests = run.part.tests
    with distribute(model, optimizer, strategy, world=world) as job:
        now = world.transport.now
        start_s = now()

        def epochs() -> float:
            """How many are in this rank's copy."""
            return job.metrics.strategy["version"] * in_step / workers / epoch_steps

        for x, y in endless_batches(run.batch, train, job):
            made.loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if world.rank == 0 and int(epochs() * tests) > (int(points[-1][0] * tests) if points else 0):
                points.append((epochs(), now() - start_s, local_accuracy(made, model, test)))
            if (job.metrics.steps / epoch_steps if clocked else epochs()) >= run.part.epochs:
                break
        ended = epochs(), now() - start_s
        with job.consensus():
            if clocked:  # Everybody's last update is in.
                ended = epochs(), now() - start_s
            accuracy = local_accuracy(made, model, test) if world.rank == 0 else 0.0
        staleness = job.metrics.strategy["staleness"]
    points = [*(point for point in points if point[0] < ended[0]), (*ended, accuracy)]
    return {
        "points": [[round(value, 4) for value in point] for point in points], "accuracy": accuracy,
        "epochs": ended[0], "seconds": ended[1], "staleness": staleness,
        "learning_rate": optimizer.param_groups[0]["lr"],
    }  # fmt: skip
