"""Calibration: measure how fast ranks compute and communicate, and make the `Cluster` that behaves the same."""

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
"""Steps that are not counted, and steps of which the median is taken."""

REFERENCE, REFERENCE_WITHIN = "recursive_doubling", "native"
"""Strategies of the reference run, whose time beyond that of the parts is unexplained: on several hosts, and on one."""


def measure(name: str) -> dict[str, Any]:
    """Measure what a `Cluster` needs to know, on this rank and its peers; the same on every rank. Collective."""
    transport, reporter = init().transport, SupervisorPipe()
    reporter.progress(doing="sending messages")
    measured = measure_network(transport)
    reporter.progress(doing="training")
    return measured | measure_training(name, transport)


def cluster_of(measured: dict[str, Any], name: str = "calibrated") -> Cluster:
    """Return the cluster that a measurement describes.

    The measured parts are simulated together. What a real step took beyond that is charged to every step: hooks,
    switches between threads, cores that computing takes from the network.
    """
    computing_s = measured["forward_s"] + measured["backward_s"]
    sample_s, share = computing_s / measured["batch_size"], measured["forward_s"] / computing_s
    size = measured["size"]
    cluster = cluster_with(measured, name, compute=Compute(sample_s=sample_s, step_s=measured["step_s"], forward=share))
    # Few steps are enough: simulated steps are all alike.
    simulated = simulate(
        train_steps, measured["recipe"], measured["reference"], _WARM_UP, workers=size, cluster=cluster
    )
    unexplained_s = max(0.0, measured["real_s"] - max(step_s for step_s, _ in simulated.results))
    compute = Compute(sample_s=sample_s, step_s=measured["step_s"] + unexplained_s, forward=share)
    return replace(cluster, compute=compute)


def batch_size_of(name: str, workers: int) -> int:
    """Return the samples of each worker per step."""
    return max(1, recipe(name).batch_size // workers)


def train_steps(name: str, strategy: str, steps: int) -> tuple[float, str]:
    """Train some steps; return the median seconds of a step and a digest of the parameters.

    A dedicated server returns 0 and "".
    """
    world = init()
    try:
        return _train_steps(name, strategy, steps, world)
    except SystemExit:  # `distribute` ends a server so, once the workers have finished.
        return 0.0, ""
    finally:
        set_world(world)  # `distribute` may have made it the world without the servers.


def _train_steps(name: str, strategy: str, steps: int, world: World) -> tuple[float, str]:
    training_recipe = recipe(name)
    # All ranks start from the same parameters, and the digest is the same in every run.
    torch.manual_seed(0)
    model = training_recipe.model()
    optimizer = training_recipe.optimizer(model)
    times = []
    with distribute(model, optimizer, parse(strategy), world=world) as job:
        rank, size = job.world.rank, job.world.size
        batch_size = batch_size_of(name, size)
        # Rank r has the r-th part of one global batch: N ranks train on what one would.
        x, y = (
            part[rank * batch_size : (rank + 1) * batch_size] for part in training_recipe.example(batch_size * size)
        )
        for _ in range(_WARM_UP + steps):
            start_s = world.transport.now()
            training_recipe.loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(world.transport.now() - start_s)
    bits = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    return statistics.median(times[_WARM_UP:]), bits.hexdigest()


def measure_training(name: str, transport: Transport) -> dict[str, Any]:
    """Time the parts of a step with all ranks computing at once, and a whole step, on the slowest rank. Collective."""
    batch_size = batch_size_of(name, transport.size)
    by_rank = all_gather_json(_parts(name, batch_size, transport), transport)
    # In every round the slowest rank counts: the others wait for it.
    slowest = [max(rows, key=sum) for rows in zip(*by_rank, strict=True)]
    parts = (statistics.median(row[part] for row in slowest) for part in range(3))
    reference = REFERENCE if len(set(transport.hosts)) > 1 else REFERENCE_WITHIN
    real_s = max(all_gather_json(train_steps(name, reference, _ROUNDS)[0], transport))
    named = dict(zip(("forward_s", "backward_s", "step_s"), parts, strict=True))
    return {**named, "real_s": real_s, "reference": reference, "recipe": name, "batch_size": batch_size}


def _parts(name: str, batch_size: int, transport: Transport) -> list[list[float]]:
    """Return rows of the seconds of forward, backward and step, with nothing exchanged."""
    training_recipe = recipe(name)
    model = training_recipe.model()
    optimizer = training_recipe.optimizer(model)
    x, y = training_recipe.example(batch_size)
    now, rows = transport.now, []
    for _ in range(_WARM_UP + _ROUNDS):
        if transport.size > 1:
            run(recursive_doubling.steps(torch.zeros(1), transport))  # A barrier: all ranks start together.
        times = [now()]
        loss = training_recipe.loss(model(x), y)
        times.append(now())
        loss.backward()
        times.append(now())
        optimizer.step()
        optimizer.zero_grad()
        times.append(now())
        rows.append([later - earlier for earlier, later in pairwise(times)])
    return rows[_WARM_UP:]
