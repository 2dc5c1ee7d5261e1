"""Strom (2015), and Lian et al. (2017): training without a server, among sites far apart and among many workers.

In virtual time with real gradients. First, sites on the internet: peers that tell each other what their steps change,
with and without what a codec has left out, against all-reduce and against one and N servers. Then gossip against
all-reduce: what is learnt, and what every worker sends, by graph and by number of workers.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from reproductions.context import ReproductionContext, machine
from reproductions.decentralised.report import write_report
from reproductions.subsets import endless_batches, local_accuracy, subset
from tutti.cluster import Cluster, Compute, Jitter, Link
from tutti.job import distribute
from tutti.launch import init
from tutti.recipes import recipe
from tutti.simulation.runs.simulate import Simulation, simulate
from tutti.strategies import ParameterServer, parse

STEP_S = 0.040
"""What a worker computes in a step, whatever its batch."""
JITTER = Jitter(0.05)
EVEN = Link("1gbit", "50us")
"""Of every worker's host, where workers are not on `africa-wan`."""
HUB = "cape-town"
"""The site with the best links: if only one server serves, it is there."""


@dataclass(frozen=True)
class Way:
    """A strategy, and the learning rate that goes with it."""

    name: str
    strategy: str
    in_full: bool = False
    """Every worker's update is applied by itself, not the mean of all: so it has an Nth of the rate."""
    equal: bool = False
    """Under servers, too, every worker takes as many steps: else whoever is fast takes more."""

    @property
    def num_dedicated_servers(self) -> int:
        return parse(self.strategy).num_dedicated_servers


ALL_REDUCE = Way("all-reduce", "ring")
WAYS = (
    ALL_REDUCE,
    Way("1 server", "ps:async,servers=1", in_full=True),
    Way("1 server, equal shares", "ps:async,servers=1", in_full=True, equal=True),
    Way("N servers", "ps:async", in_full=True),
    Way("peers, exact", "peers", in_full=True),
    Way("peers, exact, inbox of 2", "peers:inbox=2", in_full=True),
    Way("peers, threshold with residual", "peers+threshold", in_full=True),
    Way("peers, threshold without residual", "peers+threshold:feedback=0", in_full=True),
    Way("peers, one bit with residual", "peers+onebit", in_full=True),
)
GOSSIP = (
    Way("gossip, ring", "gossip:graph=ring"),
    Way("gossip, torus", "gossip:graph=torus"),
    Way("gossip, exponential", "gossip"),
    Way("gossip, random pairs", "gossip:graph=random"),
    Way("gossip, async pairs", "gossip:pairs=async"),
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A recipe, cut down to what there is time for, and how it is trained."""

    name: str
    recipe: str
    cluster: str
    """`africa-wan`, or `even`."""
    batch: int
    """Over all workers together."""
    num_train: int
    num_test: int
    epochs: int
    rate: float
    """The learning rate of a step that is made of an update of every worker."""
    workers: tuple[int, ...]
    ways: tuple[Way, ...]
    momentum: float = 0.0
    decays: bool = False
    """The learning rate falls to 0, in a line."""
    tests: int = 4
    """In an epoch."""
    seeds: tuple[int, ...] = (0,)

    @property
    def num_steps(self) -> int:
        """Of every worker, or on average."""
        return self.epochs * (self.num_train // self.batch)


PLAN = (
    Part(
        name="sites", recipe="mnist-mlp", cluster="africa-wan", batch=128, num_train=2560, num_test=2000, epochs=10,
        rate=0.05, workers=(4, 8), ways=WAYS,
    ),
    Part(
        name="gossip", recipe="mnist-mlp", cluster="even", batch=256, num_train=51_200, num_test=10_000, epochs=2,
        rate=0.1, workers=(16,), ways=(ALL_REDUCE, *GOSSIP), momentum=0.9, decays=True, tests=8,
        seeds=(0, 1, 2),
    ),
)  # fmt: skip
QUICK = (
    replace(PLAN[0], recipe="digits", batch=64, num_train=640, num_test=200, epochs=2, rate=0.1, workers=(4,)),
    replace(PLAN[1], recipe="digits", batch=64, num_train=1280, num_test=200, epochs=1, workers=(8,), seeds=(0,)),
)
SIZES = (4, 8, 16, 32)
"""Numbers of workers of which what is sent is measured, in a few steps."""
SIZE_WAYS = (ALL_REDUCE, Way("peers, exact", "peers", in_full=True), *GOSSIP)
SIZE_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class Run:
    """What every rank is told."""

    part: Part
    way: Way
    workers: int
    num_steps: int
    data: Path | None
    seed: int = 0

    @property
    def batch(self) -> int:
        """Of a worker."""
        return max(1, self.part.batch // self.workers)

    @property
    def rate(self) -> float:
        return self.part.rate / (self.workers if self.way.in_full else 1)


def reproduce(context: ReproductionContext) -> str:
    """Do all of it; the report, in Markdown."""
    plan = QUICK if context.quick else PLAN
    recipe(plan[0].recipe).data(context.data)  # A missing file is better said before the work than in it.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # Many small steps: two threads would mostly wait for each other.
    try:
        runs = list(_trained(plan, context))
        sizes = list(_sizes(plan[-1], context))
    finally:
        torch.set_num_threads(num_threads)
    about = {"machine": machine(), "quick": context.quick, "step_s": STEP_S, "jitter": JITTER.spread}
    where = {"even": str(EVEN), "hub": HUB, "wan": str(Cluster.load("africa-wan"))}
    result = {**about, **where, "plan": [asdict(part) for part in plan], "runs": runs, "sizes": sizes}
    lines = json.dumps(result).replace('{"name"', '\n{"name"').replace('{"part"', '\n{"part"')
    (context.folder / "results.json").write_text(lines + "\n")
    return write_report(result, context.folder)


def _trained(plan: tuple[Part, ...], context: ReproductionContext) -> Iterator[dict[str, Any]]:
    """Every part, size and way, trained to the end."""
    runs = [
        Run(part=part, way=way, workers=workers, num_steps=part.num_steps, data=context.data, seed=seed)
        for part in plan
        for seed in part.seeds
        for workers in part.workers
        for way in part.ways
    ]
    for number, run in enumerate(runs, 1):
        outcome = one(run)
        done = f"{outcome['accuracy']:.1%} in {outcome['seconds']:.1f} virtual s"
        context.progress(f"{number} of {len(runs)}: {run.part.name}, {run.workers} workers, {run.way.name}: {done}")
        yield outcome


def _sizes(part: Part, context: ReproductionContext) -> Iterator[dict[str, Any]]:
    """What a worker sends in a step, by number of workers."""
    sizes = SIZES[:2] if context.quick else SIZES
    for way in SIZE_WAYS:
        runs = [Run(part=part, way=way, workers=size, num_steps=2 * SIZE_STEPS, data=context.data) for size in sizes]
        sent = [mean(_amid(outcome["sent"]) for outcome in simulate_run(run).results) for run in runs]
        context.progress(f"bytes of {way.name}: {', '.join(f'{num_bytes:,.0f}' for num_bytes in sent)}")
        yield {"name": way.name, "workers": sizes, "step_bytes": [round(num_bytes) for num_bytes in sent]}


def _amid(sent: list[int]) -> float:
    """Bytes in a step, neither at the start nor near the end: who is there first is sent nothing any more."""
    begin, end = 1, len(sent) // 2
    return (sent[end] - sent[begin]) / (end - begin)


def cluster_of(run: Run) -> Cluster:
    """As many workers at every site, and servers that do nothing else at the hub; or a host for every worker."""
    compute = Compute(sample_s=STEP_S / run.batch)
    if run.part.cluster == "even":
        return Cluster(name="even", link=EVEN, compute=compute, jitter=JITTER, seed=run.seed)
    wan = Cluster.load(run.part.cluster)
    assert isinstance(wan.hosts, tuple)
    each = run.workers // len(wan.hosts)
    assert each * len(wan.hosts) == run.workers
    sites = sorted(wan.hosts, key=lambda host: host.name == HUB)  # Servers are the last ranks.
    hosts = (replace(site, ranks=each + (run.way.num_dedicated_servers if site.name == HUB else 0)) for site in sites)
    return replace(wan, hosts=tuple(hosts), compute=compute, jitter=JITTER, seed=run.seed)


def simulate_run(run: Run) -> Simulation:
    """All ranks of a run, in virtual time."""
    return simulate(_train, run, workers=run.workers + run.way.num_dedicated_servers, cluster=cluster_of(run))


def one(run: Run) -> dict[str, Any]:
    """Train once in virtual time, and how it went."""
    simulation = simulate_run(run)
    outcomes = simulation.results[: run.workers]
    first, seconds = outcomes[0], max(outcome["seconds"] for outcome in outcomes)
    points = [point for point in first["points"] if point[1] < seconds]
    return {
        "part": run.part.name, "workers": run.workers, "way": run.way.name, "strategy": run.way.strategy,
        "seed": run.seed, "batch": run.batch, "learning_rate": run.rate, "accuracy": first["accuracy"],
        "own": [min(outcome["own"] for outcome in outcomes), max(outcome["own"] for outcome in outcomes)],
        "seconds": round(seconds, 4), "steps": [outcome["steps"] for outcome in outcomes],
        "step_bytes": round(_sent(run, simulation)), "spectral_gap": first["spectral_gap"],
        "points": [*points, [run.num_steps, round(seconds, 4), first["accuracy"]]],
    }  # fmt: skip


def _sent(run: Run, simulation: Simulation) -> float:
    """Bytes between hosts, in a step of a worker: without those of a run of no steps, which begins and ends as well."""
    idle = simulate_run(replace(run, num_steps=0))
    steps = sum(outcome["steps"] for outcome in simulation.results[: run.workers])
    return (_between_hosts(run, simulation) - _between_hosts(run, idle)) / steps


def _between_hosts(run: Run, simulation: Simulation) -> int:
    hosts = {host.name for host in cluster_of(run).place(run.workers + run.way.num_dedicated_servers)}
    return sum(traffic.num_bytes for name, traffic in simulation.links.items() if name.removesuffix(" out") in hosts)


def _train(run: Run) -> dict[str, Any]:
    """Train on this rank until it, or under servers all together, have taken so many steps a worker."""
    world, part, made = init(), run.part, recipe(run.part.recipe)
    torch.manual_seed(run.seed)
    model = made.model()
    optimizer = made.optimizer(model)
    for group in optimizer.param_groups:
        group["lr"], group["momentum"] = run.rate, part.momentum
    strategy = parse(run.way.strategy)
    served = isinstance(strategy, ParameterServer) and not run.way.equal
    train, test = subset(part.recipe, part.num_train, part.num_test, run.data)
    between_tests = part.num_train // part.batch / part.tests
    points: list[list[float]] = []
    sent: list[int] = []
    with distribute(model, optimizer, strategy, world=world) as job:
        now = world.transport.now
        start_s = now()

        def steps() -> float:
            """How many of every worker, on average, are in this rank's copy."""
            return job.metrics.strategy["version"] / run.workers if served else job.steps

        batches = endless_batches(run.batch, train, job, run.seed)
        while steps() < run.num_steps:
            sent.append(job.metrics.bytes_sent)
            x, y = next(batches)
            loss = made.loss(model(x), y)  # Now all that was to be read is here.
            if world.rank == 0 and steps() >= between_tests * (1 + len(points)):
                points.append([round(steps(), 2), round(now() - start_s, 4), local_accuracy(made, model, test)])
            loss.backward()
            if part.decays:
                for group in optimizer.param_groups:
                    group["lr"] = run.rate * (1 - steps() / run.num_steps)
            optimizer.step()
            optimizer.zero_grad()
        seconds = now() - start_s
        own = local_accuracy(made, model, test) if run.num_steps == part.num_steps else 0.0
        gap = job.metrics.strategy.get("spectral_gap")
        num_steps = job.steps
        with job.consensus():
            accuracy = local_accuracy(made, model, test) if world.rank == 0 else 0.0
    return {
        "points": points, "accuracy": accuracy, "own": own, "seconds": seconds, "steps": num_steps, "spectral_gap": gap,
        "sent": sent,
    }  # fmt: skip
