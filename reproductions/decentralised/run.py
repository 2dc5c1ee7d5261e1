"""Strom (2015) and Lian et al. (2017): training without a parameter server, between sites and among many workers.

Gradients are real and time is virtual. First, sites on the internet: peers that send each other the changes of their
steps, with and without the residual of a codec, compared with all-reduce and with one and N servers. Then gossip and
all-reduce: the accuracy, and the bytes that every worker sends, by graph and by number of workers.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import torch

from reproductions.context import ReproductionContext, machine
from reproductions.decentralised.report import write_report
from reproductions.decentralised.results import (
    ALL_REDUCE,
    EXACT,
    EXACT_SMALL_INBOX,
    NO_RESIDUAL,
    RESIDUAL,
    SERVERS,
    DecentralisedMethod,
    DecentralisedResults,
    DecentralisedRun,
    DecentralisedTask,
    StepPoint,
    TrafficByWorkers,
)
from reproductions.records import save
from reproductions.subsets import endless_batches, local_accuracy, subset
from tutti.cluster import Cluster, Compute, Jitter, Link
from tutti.job import distribute
from tutti.launch import init
from tutti.recipes import recipe
from tutti.simulation.runs.simulate import Simulation, simulate
from tutti.strategies import ParameterServer, parse

STEP_S = 0.040
"""Virtual seconds of computation per step of a worker, whatever its batch."""
JITTER = Jitter(0.05)
EVEN_LINK = Link("1gbit", "50us")
"""Link of every worker's host where workers are not on `africa-wan`."""
HUB = "cape-town"
"""Site with the best links: a single server is there."""

BASELINE = DecentralisedMethod(ALL_REDUCE, "ring")
EXACT_PEERS = DecentralisedMethod(EXACT, "peers:inbox=8", separate_updates=True)
SITE_METHODS = (
    BASELINE,
    DecentralisedMethod(SERVERS[0], "ps:async,servers=1", separate_updates=True),
    DecentralisedMethod(SERVERS[1], "ps:async,servers=1", separate_updates=True, equal_shares=True),
    DecentralisedMethod(SERVERS[2], "ps:async", separate_updates=True),
    EXACT_PEERS,
    DecentralisedMethod(EXACT_SMALL_INBOX, "peers:inbox=2", separate_updates=True),
    DecentralisedMethod(RESIDUAL, "peers:inbox=8+threshold", separate_updates=True),
    DecentralisedMethod(NO_RESIDUAL, "peers:inbox=8+threshold:feedback=0", separate_updates=True),
    DecentralisedMethod("peers, 1-bit with residual", "peers:inbox=8+onebit", separate_updates=True),
)
GOSSIP_METHODS = (
    DecentralisedMethod("gossip, ring", "gossip:graph=ring"),
    DecentralisedMethod("gossip, torus", "gossip:graph=torus"),
    DecentralisedMethod("gossip, exponential", "gossip"),
    DecentralisedMethod("gossip, random pairs", "gossip:graph=random"),
    DecentralisedMethod("gossip, async pairs", "gossip:pairs=async"),
)

FULL = (
    DecentralisedTask(
        name="sites", recipe="mnist-mlp", cluster="africa-wan", batch=128, num_train=2560, num_test=2000, epochs=10,
        learning_rate=0.05, workers=(4, 8), methods=SITE_METHODS,
    ),
    DecentralisedTask(
        name="gossip", recipe="mnist-mlp", cluster="even", batch=256, num_train=51_200, num_test=10_000, epochs=2,
        learning_rate=0.1, workers=(16,), methods=(BASELINE, *GOSSIP_METHODS), momentum=0.9, decays=True,
        tests_per_epoch=8, seeds=(0, 1, 2),
    ),
)  # fmt: skip
QUICK = (
    replace(FULL[0], recipe="digits", batch=64, num_train=640, num_test=200, epochs=1, learning_rate=0.1, workers=(4,)),
    replace(FULL[1], recipe="digits", batch=64, num_train=640, num_test=200, epochs=1, workers=(8,), seeds=(0,)),
)
TRAFFIC_WORKERS = (4, 8, 16, 32)
"""Numbers of workers for which the traffic is counted, in a few steps."""
TRAFFIC_METHODS = (BASELINE, EXACT_PEERS, *GOSSIP_METHODS)
TRAFFIC_STEPS = 20
QUICK_TRAFFIC_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class DecentralisedJob:
    """One run to simulate: a task with one method, number of workers and seed."""

    task: DecentralisedTask
    method: DecentralisedMethod
    workers: int
    num_steps: int
    """Steps per worker."""
    data: Path | None
    seed: int = 0

    @property
    def batch(self) -> int:
        """Samples in one worker's batch."""
        return max(1, self.task.batch // self.workers)

    @property
    def learning_rate(self) -> float:
        """The task's, or an N-th of it for updates that are applied separately."""
        return self.task.learning_rate / (self.workers if self.method.separate_updates else 1)

    @property
    def num_ranks(self) -> int:
        """Workers and dedicated servers."""
        return self.workers + self.method.num_dedicated_servers


@dataclass(frozen=True)
class RankOutcome:
    """What one worker returns; points and final accuracy are rank 0's only."""

    points: tuple[StepPoint, ...]
    accuracy: float
    local_accuracy: float
    seconds: float
    steps: int
    spectral_gap: float | None
    bytes_sent: tuple[int, ...]
    """Bytes sent in total before every step."""


def reproduce(context: ReproductionContext) -> str:
    """Simulate everything, and write results, figures and report; return the report."""
    tasks = QUICK if context.quick else FULL
    recipe(tasks[0].recipe).data(context.data)  # A missing dataset must be reported before the training.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # Many small steps: two threads would mostly wait for each other.
    try:
        runs = tuple(_train_all(tasks, context))
        traffic = tuple(_count_traffic(tasks[-1], context))
    finally:
        torch.set_num_threads(num_threads)
    results = DecentralisedResults(
        machine=machine(),
        quick=context.quick,
        step_s=STEP_S,
        jitter=JITTER.spread,
        even_link=str(EVEN_LINK),
        hub=HUB,
        wan=str(Cluster.load("africa-wan")),
        tasks=tasks,
        runs=runs,
        traffic=traffic,
    )
    save(results, context.folder / "results.json")
    return write_report(results, context.folder)


def _train_all(tasks: tuple[DecentralisedTask, ...], context: ReproductionContext) -> Iterator[DecentralisedRun]:
    jobs = [
        DecentralisedJob(
            task=task, method=method, workers=workers, num_steps=task.num_steps, data=context.data, seed=seed
        )
        for task in tasks
        for seed in task.seeds
        for workers in task.workers
        for method in task.methods
    ]
    for number, job in enumerate(jobs, 1):
        run = simulate_job(job)
        outcome = f"{run.accuracy:.1%} in {run.seconds:.1f} virtual s"
        context.progress(f"{number} of {len(jobs)}: {run.task}, {run.workers} workers, {run.method}: {outcome}")
        yield run


def _count_traffic(task: DecentralisedTask, context: ReproductionContext) -> Iterator[TrafficByWorkers]:
    """Count the bytes that a worker sends per step, by number of workers."""
    sizes = TRAFFIC_WORKERS[:2] if context.quick else TRAFFIC_WORKERS
    for method in TRAFFIC_METHODS:
        counts = []
        for workers in sizes:
            job = DecentralisedJob(
                task=task,
                method=method,
                workers=workers,
                num_steps=QUICK_TRAFFIC_STEPS if context.quick else TRAFFIC_STEPS,
                data=context.data,
            )
            outcomes: list[RankOutcome] = simulate_ranks(job).results
            counts.append(round(mean(_bytes_per_step(outcome.bytes_sent) for outcome in outcomes)))
        context.progress(f"bytes of {method.name}: {', '.join(f'{count:,}' for count in counts)}")
        yield TrafficByWorkers(method=method.name, workers=sizes, bytes_per_step=tuple(counts))


def _bytes_per_step(sent: tuple[int, ...]) -> float:
    """Return the bytes per step without the first step and the last ones: a rank that is done receives no more."""
    begin, end = 1, len(sent) // 2
    return (sent[end] - sent[begin]) / (end - begin)


def make_cluster(job: DecentralisedJob) -> Cluster:
    """Return the WAN with as many workers at every site and dedicated servers at the hub, or one host per worker."""
    compute = Compute(sample_s=STEP_S / job.batch)
    if job.task.cluster == "even":
        return Cluster(name="even", link=EVEN_LINK, compute=compute, jitter=JITTER, seed=job.seed)
    wan = Cluster.load(job.task.cluster)
    assert isinstance(wan.hosts, tuple)
    per_site = job.workers // len(wan.hosts)
    assert per_site * len(wan.hosts) == job.workers
    sites = sorted(wan.hosts, key=lambda host: host.name == HUB)  # The hub last: servers are the last ranks.
    servers = {HUB: job.method.num_dedicated_servers}
    hosts = (replace(site, ranks=per_site + servers.get(site.name, 0)) for site in sites)
    return replace(wan, hosts=tuple(hosts), compute=compute, jitter=JITTER, seed=job.seed)


def simulate_ranks(job: DecentralisedJob) -> Simulation:
    """Simulate all ranks of a job."""
    return simulate(_train, job, workers=job.num_ranks, cluster=make_cluster(job))


def simulate_job(job: DecentralisedJob) -> DecentralisedRun:
    """Train once in virtual time."""
    simulation = simulate_ranks(job)
    outcomes: list[RankOutcome] = simulation.results[: job.workers]
    first, seconds = outcomes[0], max(outcome.seconds for outcome in outcomes)
    accuracies = [outcome.local_accuracy for outcome in outcomes]
    points = [point for point in first.points if point.seconds < seconds]
    return DecentralisedRun(
        task=job.task.name,
        workers=job.workers,
        method=job.method.name,
        strategy=job.method.strategy,
        seed=job.seed,
        batch=job.batch,
        learning_rate=job.learning_rate,
        accuracy=first.accuracy,
        local_accuracy=(min(accuracies), max(accuracies)),
        seconds=round(seconds, 4),
        steps=tuple(outcome.steps for outcome in outcomes),
        bytes_per_step=round(_training_bytes_per_step(job, simulation)),
        spectral_gap=first.spectral_gap,
        points=(*points, StepPoint(job.num_steps, round(seconds, 4), first.accuracy)),
    )


def _training_bytes_per_step(job: DecentralisedJob, simulation: Simulation) -> float:
    """Return the bytes between hosts per step of a worker, without those that a run of no steps sends too."""
    idle = simulate_ranks(replace(job, num_steps=0))
    steps = sum(outcome.steps for outcome in simulation.results[: job.workers])
    return (_bytes_between_hosts(job, simulation) - _bytes_between_hosts(job, idle)) / steps


def _bytes_between_hosts(job: DecentralisedJob, simulation: Simulation) -> int:
    hosts = {host.name for host in make_cluster(job).place(job.num_ranks)}
    return sum(traffic.num_bytes for name, traffic in simulation.links.items() if name.removesuffix(" out") in hosts)


def _train(job: DecentralisedJob) -> RankOutcome:
    """Train on this rank for its steps; under servers, until all workers together have made as many per worker."""
    world, task, made = init(), job.task, recipe(job.task.recipe)
    torch.manual_seed(job.seed)
    model = made.model()
    optimizer = made.optimizer(model)
    for group in optimizer.param_groups:
        group["lr"], group["momentum"] = job.learning_rate, task.momentum
    strategy = parse(job.method.strategy)
    shared_steps = isinstance(strategy, ParameterServer) and not job.method.equal_shares
    train, test = subset(task.recipe, task.num_train, task.num_test, job.data)
    between_tests = task.num_train // task.batch / task.tests_per_epoch
    points: list[StepPoint] = []
    sent: list[int] = []
    with distribute(model, optimizer, strategy, world=world) as handle:
        now = world.transport.now
        start_s = now()

        def steps() -> float:
            """Return how many steps per worker, on average, are in this rank's copy of the parameters."""
            return handle.metrics.strategy["version"] / job.workers if shared_steps else handle.steps

        batches = endless_batches(job.batch, train, handle, job.seed)
        while steps() < job.num_steps:
            sent.append(handle.metrics.bytes_sent)
            x, y = next(batches)
            loss = made.loss(model(x), y)  # From here on, all parameters that forward reads have arrived.
            if world.rank == 0 and steps() >= between_tests * (1 + len(points)):
                accuracy = local_accuracy(made, model, test)
                points.append(StepPoint(round(steps(), 2), round(now() - start_s, 4), accuracy))
            loss.backward()
            if task.decays:
                for group in optimizer.param_groups:
                    group["lr"] = job.learning_rate * (1 - steps() / job.num_steps)
            optimizer.step()
            optimizer.zero_grad()
        seconds = now() - start_s
        own_accuracy = local_accuracy(made, model, test) if job.num_steps == task.num_steps else 0.0
        spectral_gap, num_steps = handle.metrics.strategy.get("spectral_gap"), handle.steps
        with handle.consensus():
            accuracy = local_accuracy(made, model, test) if world.rank == 0 else 0.0
    return RankOutcome(tuple(points), accuracy, own_accuracy, seconds, num_steps, spectral_gap, tuple(sent))
