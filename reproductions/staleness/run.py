"""Dong, and Kim (2016): how far workers may drift apart, and what that gains and costs.

Parameter servers are simulated with real gradients and virtual time: BSP, bounded staleness, soft synchronisation and
asynchronous SGD, on clusters whose workers are even, have one slow worker, or pause at random.
"""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from reproductions.context import ReproductionContext, machine
from reproductions.records import save
from reproductions.staleness.report import write_report
from reproductions.staleness.results import (
    ASYNC,
    BSP,
    RULES,
    AccuracyPoint,
    ClusterName,
    ConsistencyRule,
    StalenessResults,
    StalenessRun,
    StalenessTask,
    num_servers,
)
from reproductions.subsets import endless_batches, local_accuracy, subset
from tutti.cluster import Cluster, Compute, Jitter, Link, Pauses
from tutti.job import distribute
from tutti.launch import init
from tutti.recipes import recipe
from tutti.simulation.runs.simulate import simulate
from tutti.strategies import ParameterServer, parse

STEP_S = 0.040
"""Virtual seconds of computation per step of a worker, whatever its batch."""
LINK = Link("10gbit", "50us")
JITTER = Jitter(0.05)
SLOWDOWN = 2.0
PAUSES = Pauses(20 * STEP_S, 3 * STEP_S)

MNIST = StalenessTask(
    name="mnist-mlp", recipe="mnist-mlp", batch=128, num_train=2560, num_test=2000, epochs=4, learning_rate=0.05
)
MOMENTUM = replace(MNIST, name="mnist-mlp, momentum 0.9", momentum=0.9, workers=(8,), clusters=("even",))
CIFAR = StalenessTask(
    name="cifar-quick", recipe="cifar-quick", batch=32, num_train=1280, num_test=500, epochs=4, learning_rate=0.05,
    tests_per_epoch=2, workers=(8,),
)  # fmt: skip
CIFAR_32 = replace(CIFAR, workers=(32,), clusters=("one slow",))
FULL = (MNIST, MOMENTUM, CIFAR, CIFAR_32)
QUICK = (
    StalenessTask(
        name="digits", recipe="digits", batch=64, num_train=640, num_test=200, epochs=2, learning_rate=0.1,
        workers=(4,), clusters=("one slow",),
        rules=tuple(rule for rule in RULES if rule.name in (BSP, "SSP 3", ASYNC)),
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StalenessJob:
    """One run to simulate: a task with one number of workers, cluster and rule."""

    task: StalenessTask
    workers: int
    cluster: ClusterName
    rule: ConsistencyRule
    data: Path | None

    @property
    def batch(self) -> int:
        """Samples in one worker's batch."""
        return self.task.batch // self.workers


@dataclass(frozen=True)
class WorkerOutcome:
    """What one worker returns; points and accuracy are rank 0's only."""

    points: tuple[AccuracyPoint, ...]
    accuracy: float
    epochs: float
    seconds: float
    staleness: dict[int, int]
    learning_rate: float


def reproduce(context: ReproductionContext) -> str:
    """Simulate everything, and write results, figures and report; return the report."""
    tasks = QUICK if context.quick else FULL
    for task in tasks:
        recipe(task.recipe).data(context.data)  # A missing dataset must be reported before the training.
    jobs = [
        StalenessJob(task=task, workers=workers, cluster=cluster, rule=rule, data=context.data)
        for task in tasks
        for workers in task.workers
        for cluster in task.clusters
        for rule in task.rules
    ]
    results = StalenessResults(
        machine=machine(),
        quick=context.quick,
        step_s=STEP_S,
        link=str(LINK),
        jitter=JITTER.spread,
        pause_every_s=PAUSES.every_s,
        pause_s=PAUSES.length_s,
        slowdown=SLOWDOWN,
        tasks=tasks,
        runs=tuple(_run_all(jobs, context)),
    )
    save(results, context.folder / "results.json")
    return write_report(results, context.folder)


def _run_all(jobs: list[StalenessJob], context: ReproductionContext) -> list[StalenessRun]:
    runs: list[StalenessRun] = []
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # Servers make many small steps: two threads would mostly wait for each other.
    try:
        for job in jobs:
            run = simulate_job(job)
            runs.append(run)
            text = f"{run.task}, {run.workers} workers, {run.cluster}, {run.rule}"
            outcome = f"{run.accuracy:.1%} in {run.seconds:.1f} virtual s"
            context.progress(f"{len(runs)} of {len(jobs)}: {text}: {outcome}")
    finally:
        torch.set_num_threads(num_threads)
    return runs


def make_cluster(job: StalenessJob) -> Cluster:
    """Return the job's cluster: even workers with a little jitter; the last one slow; or pauses at random."""
    return Cluster(
        name=job.cluster,
        link=LINK,
        compute=Compute(sample_s=STEP_S / job.batch),
        jitter=JITTER,
        slow={job.workers - 1: SLOWDOWN} if job.cluster == "one slow" else {},
        pauses=PAUSES if job.cluster == "pauses" else None,
    )


def simulate_job(job: StalenessJob) -> StalenessRun:
    """Train once in virtual time."""
    workers = job.workers
    simulation = simulate(_train, job, workers=workers + num_servers(workers), cluster=make_cluster(job))
    outcomes: list[WorkerOutcome] = simulation.results[:workers]
    staleness: Counter[int] = Counter()
    for outcome in outcomes:
        staleness.update(outcome.staleness)
    first = outcomes[0]
    times = [(rank.busy_s, rank.communicating_s + rank.waiting_s) for rank in simulation.ranks[:workers]]
    busy_fraction = sum(busy_s / (busy_s + idle_s) for busy_s, idle_s in times) / workers
    return StalenessRun(
        task=job.task.name,
        workers=workers,
        cluster=job.cluster,
        rule=job.rule.name,
        strategy=job.rule.strategy(workers),
        batch=job.batch,
        learning_rate=first.learning_rate,
        accuracy=first.accuracy,
        epochs=first.epochs,
        seconds=first.seconds,
        epoch_s=first.seconds / first.epochs,
        busy_fraction=round(busy_fraction, 4),
        staleness=dict(sorted(staleness.items())),
        points=first.points,
    )


def _train(job: StalenessJob) -> WorkerOutcome:
    """Train on this worker until its epochs are over: its own under a clock, those of the servers otherwise."""
    world, task, workers, made = init(), job.task, job.workers, recipe(job.task.recipe)
    torch.manual_seed(0)
    model = made.model()
    optimizer = made.optimizer(model)
    strategy = parse(job.rule.strategy(workers))
    assert isinstance(strategy, ParameterServer)
    clocked = strategy.consistency.bound is not None
    updates_per_step = workers if clocked else strategy.consistency.quorum
    for group in optimizer.param_groups:
        group["lr"] = task.learning_rate * (1 if job.rule.full_rate else updates_per_step / workers)
        group["momentum"] = task.momentum
    train, test = subset(task.recipe, task.num_train, task.num_test, job.data)
    epoch_steps, tests = len(train) // (job.batch * workers), task.tests_per_epoch
    points: list[AccuracyPoint] = []
    with distribute(model, optimizer, strategy, world=world) as handle:
        now = world.transport.now
        start_s = now()

        def epochs() -> float:
            """Return how many epochs' worth of updates are in this rank's copy of the parameters."""
            return handle.metrics.strategy["version"] * updates_per_step / workers / epoch_steps

        for x, y in endless_batches(job.batch, train, handle):
            made.loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if world.rank == 0 and int(epochs() * tests) > (int(points[-1].epochs * tests) if points else 0):
                points.append(AccuracyPoint(epochs(), now() - start_s, local_accuracy(made, model, test)))
            if (handle.metrics.steps / epoch_steps if clocked else epochs()) >= task.epochs:
                break
        end_epochs, end_s = epochs(), now() - start_s
        with handle.consensus():
            if clocked:  # The last update of every worker is included now.
                end_epochs, end_s = epochs(), now() - start_s
            accuracy = local_accuracy(made, model, test) if world.rank == 0 else 0.0
        staleness = handle.metrics.strategy["staleness"]
    points = [*(point for point in points if point.epochs < end_epochs), AccuracyPoint(end_epochs, end_s, accuracy)]
    return WorkerOutcome(
        points=tuple(AccuracyPoint(*(round(value, 4) for value in point)) for point in points),
        accuracy=accuracy,
        epochs=end_epochs,
        seconds=end_s,
        staleness=staleness,
        learning_rate=optimizer.param_groups[0]["lr"],
    )
