"""How training of a large model would scale: images a second on any number of workers, by sizes alone."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from tutti.cluster import Cluster
from tutti.launch import init
from tutti.recipes.models import large
from tutti.simulation.compute_clock import ComputeClock, Workload
from tutti.simulation.dry_replica import DryRunReplica
from tutti.simulation.runs.simulate import Simulation, simulate
from tutti.strategies import AllReduce, Strategy

IMAGE = (3, 224, 224)


@dataclass(frozen=True, kw_only=True)
class ScalingCase:
    """What is to be trained, on what."""

    model: str | Callable[[], nn.Module]
    """The name of a large one, or what makes any."""
    cluster: Cluster
    strategy: Strategy
    batch_size: int
    """Of each worker."""
    steps: int
    sample: tuple[int, ...] = IMAGE
    """The shape of what the model is given, without the batch."""


@dataclass(frozen=True)
class ScalingResult:
    """How a number of workers did."""

    workers: int
    step_s: float
    """Virtual."""
    images_per_s: float
    efficiency: float
    """Images a second of each worker, relative to one that is alone."""
    bytes_per_worker: float
    """Sent over the network or to other ranks of the host, in one step; of several, the first does not count."""
    num_messages: int
    wall_s: float
    """What it took to simulate."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def scaling(
    case: ScalingCase, workers: list[int], pulse: Callable[[int, float, int], None] = lambda *_: None
) -> Iterator[ScalingResult]:
    """Simulate every number of workers in turn. `pulse` is told workers, virtual seconds and messages so far."""
    with torch.device("meta"):
        model = large(case.model) if isinstance(case.model, str) else case.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        workload = Workload.of(model, (torch.empty(1, *case.sample),), {})
    even = replace(case, cluster=replace(case.cluster, slow={}, failures={}), strategy=AllReduce())
    alone = _step_s(_run(even, (model, optimizer, workload), 1, lambda *_: None))
    for number in workers:
        start = time.perf_counter()
        done = _run(case, (model, optimizer, workload), number, lambda now, sent, n=number: pulse(n, now, sent))  # type: ignore[misc]
        step_s = _step_s(done)
        yield ScalingResult(
            workers=number,
            step_s=step_s,
            images_per_s=number * case.batch_size / step_s,
            efficiency=alone / step_s,
            bytes_per_worker=sum(sent for _, sent in done.results) / number,
            num_messages=done.num_messages,
            wall_s=time.perf_counter() - start,
        )


Parts = tuple[nn.Module, torch.optim.Optimizer, Workload]


def _run(case: ScalingCase, parts: Parts, workers: int, pulse: Callable[[float, int], None]) -> Simulation:
    return simulate(
        _train, case, parts, workers=workers + case.strategy.num_dedicated_servers, cluster=case.cluster, pulse=pulse
    )


def _train(case: ScalingCase, parts: Parts) -> tuple[list[float], float]:
    """When each step ended on this rank, and how many bytes it sent in one. All share the model: it has no values.

    A rank that serves has no steps, and what it sends is not a worker's.
    """
    model, optimizer, workload = parts
    transport = init().transport.channel("job")
    replica = DryRunReplica(model, optimizer, ComputeClock(transport, workload))
    if transport.rank >= transport.size - case.strategy.num_dedicated_servers:
        case.strategy.serve(replica, transport)
        return [], 0.0
    exchange = case.strategy.attach(replica, transport)
    sent, ends = [exchange.bytes_sent], [transport.now()]
    for _ in range(case.steps):
        replica.step(case.batch_size)
        ends.append(transport.now())
        sent.append(exchange.bytes_sent)
    first = 1 if case.steps > 1 else 0  # A strategy may only learn in the first step how to go on.
    num_bytes = (sent[-1] - sent[first]) / (case.steps - first)
    if not case.strategy.synchronous:
        exchange.finish()  # Or the others would take them for lost.
    return ends, num_bytes


def _step_s(done: Simulation) -> float:
    """The mean of all steps but the first, which has nothing behind it to wait for."""
    workers = [ends for ends, _ in done.results if ends]
    begin, end = (max(ends[place] for ends in workers) for place in (1 if len(workers[0]) > 2 else 0, -1))
    return (end - begin) / max(1, len(workers[0]) - 2)
