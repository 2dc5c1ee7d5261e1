"""Measure how fast ranks compute and talk, and describe the cluster that does the same in virtual time."""

import hashlib
import statistics
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from tutti.cluster import Cluster, Compute
from tutti.collectives import all_gather_json, recursive_doubling, run
from tutti.job import distribute
from tutti.launch import init
from tutti.launch.supervisor_pipe import SupervisorPipe
from tutti.plan.network import cluster_with, measure_network
from tutti.recipes import recipe
from tutti.simulation.runs.simulate import simulate
from tutti.strategies import parse
from tutti.transports import Transport
from tutti.world import World, set_world

_WARM_UP, _ROUNDS = 5, 30

REFERENCE, REFERENCE_WITHIN = "recursive_doubling", "native"
"""What trains to find what the parts do not explain: between hosts, and on one."""


def measure(name: str) -> dict[str, Any]:
    """What a `Cluster` needs to know, measured on this rank and its peers; the same on every rank."""
    transport, reporter = init().transport, SupervisorPipe()
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
    size = found["size"]
    cluster = cluster_with(found, name, compute=Compute(sample_s=sample_s, step_s=found["step_s"], forward=share))
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
    everyones = all_gather_json(_parts(name, batch_size, transport), transport)
    slowest = [max(rows, key=sum) for rows in zip(*everyones, strict=True)]
    parts = (statistics.median(row[part] for row in slowest) for part in range(3))
    reference = REFERENCE if len(set(transport.hosts)) > 1 else REFERENCE_WITHIN
    real_s = max(all_gather_json(train_steps(name, reference, _ROUNDS)[0], transport))
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
