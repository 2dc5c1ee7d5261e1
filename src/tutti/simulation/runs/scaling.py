"""Scaling studies by dry runs: images per second of a large model on any number of workers."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from tutti.cluster import Cluster
from tutti.launch import init
from tutti.recipes.models import large
from tutti.simulation.compute_clock import ComputeClock
from tutti.simulation.dry_replica import DryRunReplica
from tutti.simulation.runs.simulate import Simulation, simulate
from tutti.simulation.workload import Workload
from tutti.strategies import AllReduce, Strategy

IMAGE = (3, 224, 224)
"""The shape of an ImageNet sample: channels, height, width."""


@dataclass(frozen=True, kw_only=True)
class ScalingCase:
    """A model, a strategy and a cluster to measure scaling of."""

    model: str | Callable[[], nn.Module]
    """The name of a large model (`tutti.recipes.models.LARGE`), or a function that makes any."""
    cluster: Cluster
    strategy: Strategy
    batch_size: int
    """Samples of each worker per step."""
    steps: int
    sample: tuple[int, ...] = IMAGE
    """The shape of one input of the model, without the batch dimension."""


@dataclass(frozen=True)
class ScalingResult:
    """The result for one number of workers."""

    workers: int
    step_s: float
    """Mean virtual time of a step."""
    images_per_s: float
    efficiency: float
    """Images per second of each worker, relative to a worker without others."""
    bytes_per_worker: float
    """Bytes that a worker sends in one step, to any rank; the first of several steps does not count."""
    num_messages: int
    wall_s: float
    """Real time that the simulation took."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def scaling(
    case: ScalingCase, workers: list[int], on_progress: Callable[[int, float, int], None] = lambda *_: None
) -> Iterator[ScalingResult]:
    """Simulate every number of workers in turn.

    `on_progress` is called with the number of workers, and virtual seconds and messages so far.
    """
    # Without values: a model of any size takes no memory, and all ranks of all runs share it.
    with torch.device("meta"):
        model = large(case.model) if isinstance(case.model, str) else case.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        workload = Workload.from_model(model, (torch.empty(1, *case.sample),), {})
    # One worker at full speed without an exchange: efficiencies are relative to it.
    reference = replace(case, cluster=replace(case.cluster, slow={}, failures={}), strategy=AllReduce())
    reference_s = _step_s(_run(reference, (model, optimizer, workload), 1, lambda *_: None))
    for number in workers:
        start = time.perf_counter()
        done = _run(case, (model, optimizer, workload), number, lambda now, sent, n=number: on_progress(n, now, sent))  # type: ignore[misc]
        step_s = _step_s(done)
        yield ScalingResult(
            workers=number,
            step_s=step_s,
            images_per_s=number * case.batch_size / step_s,
            efficiency=reference_s / step_s,
            bytes_per_worker=sum(sent for _, sent in done.results) / number,
            num_messages=done.num_messages,
            wall_s=time.perf_counter() - start,
        )


Parts = tuple[nn.Module, torch.optim.Optimizer, Workload]
"""A model on device "meta", its optimiser and its workload, which all simulated ranks share."""


def _run(case: ScalingCase, parts: Parts, workers: int, on_progress: Callable[[float, int], None]) -> Simulation:
    return simulate(
        _train,
        case,
        parts,
        workers=workers + case.strategy.num_dedicated_servers,
        cluster=case.cluster,
        on_progress=on_progress,
    )


def _train(case: ScalingCase, parts: Parts) -> tuple[list[float], float]:
    """Return when each step ended on this rank, and how many bytes it sent in one.

    All ranks share the model, which has no values. A dedicated server has no steps, and its bytes do not count.
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
        # Steps report their times to the strategy; no gradient is computed.
        replica.step(case.batch_size)
        ends.append(transport.now())
        sent.append(exchange.bytes_sent)
    first = 1 if case.steps > 1 else 0  # A strategy may plan its exchanges in the first step, which costs messages.
    num_bytes = (sent[-1] - sent[first]) / (case.steps - first)
    if not case.strategy.synchronous:
        exchange.finish()  # Else the others would take this rank for lost.
    return ends, num_bytes


def _step_s(done: Simulation) -> float:
    """Return the mean of all steps but the first, which has no exchange of an earlier step to wait for."""
    workers = [ends for ends, _ in done.results if ends]
    # `ends` begins with the start of the first step. A step ends when the slowest worker ends it.
    begin, end = (max(ends[index] for ends in workers) for index in (1 if len(workers[0]) > 2 else 0, -1))
    return (end - begin) / max(1, len(workers[0]) - 2)
