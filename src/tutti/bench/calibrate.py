"""Measure how fast ranks compute and talk, and describe the cluster that does the same in virtual time."""

import hashlib
import statistics
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from tutti.cluster import Cluster, Compute, Link
from tutti.collectives import ALGORITHMS, gather_json, measure_links, recursive_doubling, run
from tutti.job import distribute
from tutti.launch import init
from tutti.launch.link import Link as Reporter
from tutti.launch.simulate import simulate
from tutti.recipes import recipe
from tutti.strategies import parse
from tutti.transports import AllReduces, HostsTransport, Transport
from tutti.world import World, set_world

_WARM_UP, _ROUNDS = 5, 30

_TYPICAL = ("ring", "tree", "butterfly", "recursive_doubling")
"""What a message's latency is taken from: in collectives ranks wait for each other, and may share cores."""

_SMALL, _LARGE = 2**10, 2**20
"""Bytes of sums in memory."""

REFERENCE, REFERENCE_WITHIN = "recursive_doubling", "native"
"""What trains to find what the parts do not explain: between hosts, and on one."""


def measure(name: str) -> dict[str, Any]:
    """What a `Cluster` needs to know, measured on this rank and its peers; the same on every rank."""
    transport, reporter = init().transport, Reporter()
    reporter.progress(doing="sending messages")
    found = measure_network(transport)
    reporter.progress(doing="training")
    return found | measure_training(name, transport)


def cluster_of(found: dict[str, Any], name: str = "calibrated") -> Cluster:
    """The cluster that what `measure` found describes.

    Its parts are simulated together, and what a real step took beyond that is charged to every step: hooks, threads
    that wake each other, cores that computing has kept from the network.
    """
    computing_s = found["forward_s"] + found["backward_s"]
    sample_s, share = computing_s / found["batch_size"], found["forward_s"] / computing_s
    links = {kind: Link(*link) for kind, link in found["links"].items()}
    hosts, size = found["hosts"], found["size"]
    cluster = Cluster(
        name=name,
        # More workers would get more hosts of this kind; but where only memory was measured, they would share it.
        hosts=1 if hosts == 1 else None,
        ranks_per_host=-(-size // hosts) if hosts > 1 else None,
        compute=Compute(sample_s=sample_s, step_s=found["step_s"], forward=share),
        **links,  # type: ignore[arg-type]
    )
    simulated = simulate(train_steps, found["recipe"], found["reference"], _WARM_UP, workers=size, cluster=cluster)
    unexplained_s = max(0.0, found["real_s"] - max(step_s for step_s, _ in simulated.results))
    compute = Compute(sample_s=sample_s, step_s=found["step_s"] + unexplained_s, forward=share)
    return replace(cluster, compute=compute)


def batch_size_of(name: str, workers: int) -> int:
    """Of each worker."""
    return max(1, recipe(name).batch_size // workers)


def train_steps(name: str, strategy: str, steps: int) -> tuple[float, str]:
    """Train for some steps: the median seconds of a step, and a digest of the parameters; on a server, neither."""
    world = init()
    try:
        return _train_steps(name, strategy, steps, world)
    except SystemExit:
        return 0.0, ""
    finally:
        set_world(world)  # It may have been that of those who train.


def _train_steps(name: str, strategy: str, steps: int, world: World) -> tuple[float, str]:
    made = recipe(name)
    torch.manual_seed(0)
    model = made.model()
    optimizer = made.optimizer(model)
    times = []
    with distribute(model, optimizer, parse(strategy), world=world) as job:
        rank, size = job.world.rank, job.world.size
        batch_size = batch_size_of(name, size)
        x, y = (part[rank * batch_size : (rank + 1) * batch_size] for part in made.example(batch_size * size))
        for _ in range(_WARM_UP + steps):
            start_s = world.transport.now()
            made.loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(world.transport.now() - start_s)
    bits = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    return statistics.median(times[_WARM_UP:]), bits.hexdigest()


def measure_training(name: str, transport: Transport) -> dict[str, Any]:
    """How long the parts of a step take with all ranks computing at once, and a whole step; the slowest rank's."""
    batch_size = batch_size_of(name, transport.size)
    everyones = gather_json(_parts(name, batch_size, transport), transport)
    slowest = [max(rows, key=sum) for rows in zip(*everyones, strict=True)]
    parts = (statistics.median(row[part] for row in slowest) for part in range(3))
    reference = REFERENCE if len(set(transport.hosts)) > 1 else REFERENCE_WITHIN
    real_s = max(gather_json(train_steps(name, reference, _ROUNDS)[0], transport))
    named = dict(zip(("forward_s", "backward_s", "step_s"), parts, strict=True))
    return {**named, "real_s": real_s, "reference": reference, "recipe": name, "batch_size": batch_size}


def _parts(name: str, batch_size: int, transport: Transport) -> list[list[float]]:
    """Seconds of forward, backward and step, many times, with nothing exchanged."""
    made = recipe(name)
    model = made.model()
    optimizer = made.optimizer(model)
    x, y = made.example(batch_size)
    now, rows = transport.now, []
    for _ in range(_WARM_UP + _ROUNDS):
        if transport.size > 1:
            run(recursive_doubling.steps(torch.zeros(1), transport))  # All start together.
        times = [now()]
        loss = made.loss(model(x), y)
        times.append(now())
        loss.backward()
        times.append(now())
        optimizer.step()
        optimizer.zero_grad()
        times.append(now())
        rows.append([later - earlier for earlier, later in pairwise(times)])
    return rows[_WARM_UP:]


def measure_network(transport: Transport) -> dict[str, Any]:
    """The links between hosts and within one, as far as there are any; the same on every rank."""
    links = {}
    if transport.size > 1 and len(set(transport.hosts)) == 1:
        links["within"] = _memory(transport)
    elif isinstance(transport, HostsTransport):
        links["within"] = _memory(transport.within)
        links |= {"link": _link(transport.across)} if transport.across is not None else {}
    elif transport.size > 1:
        links["link"] = _link(transport)
    first = gather_json(links, transport)[0]  # Rank 0 is the first of its host: it knows both.
    return {"links": first, "hosts": len(set(transport.hosts)), "size": transport.size}


def _link(transport: Transport) -> tuple[float, float]:
    """Rate by ping-pong of long messages; latency by collectives of short ones."""
    rate = measure_links(transport).link.bits_per_s
    latencies = []
    for name in _TYPICAL:
        collective = ALGORITHMS[name]
        tensor, times = torch.zeros(16 * transport.size), []
        for _ in range(_ROUNDS):
            start_s = transport.now()
            transport.start(collective.steps(tensor, transport)).wait()
            times.append(transport.now() - start_s)
        latencies.append(statistics.median(times) / collective.cost(transport.size, 0, Link("1gbit", 1.0)))
    return rate, statistics.median(latencies)


def _memory(transport: Transport) -> tuple[float, float]:
    """The link of which a sum in memory takes two latencies, and twice the bytes."""
    if not isinstance(transport, AllReduces):
        return _link(transport)
    medians = []
    for num_bytes in (_SMALL, _LARGE):
        tensor, times = torch.zeros(num_bytes // 4), []
        for _ in range(_ROUNDS):
            start_s = transport.now()
            transport.all_reduce(tensor).wait()
            times.append(transport.now() - start_s)
        medians.append(statistics.median(times))
    per_byte = max(1e-13, (medians[1] - medians[0]) / 2 / (_LARGE - _SMALL))
    return 8 / per_byte, medians[0] / 2
