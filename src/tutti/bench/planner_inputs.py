"""What the planner goes by, measured where ranks train: all of them at once, on the cores that they share."""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tutti.bench.models import BenchmarkModel, make_benchmark_model
from tutti.bench.training_steps import solo_step
from tutti.cluster import Cluster, Link
from tutti.collectives import all_gather_json, recursive_doubling, ring, run
from tutti.cost import bucket_loads
from tutti.cost.scaled_profile import slowed
from tutti.plan import Overhead, Profile, price
from tutti.plan.profile import profile as profile_model
from tutti.simulation.runs.calibrate import measure_network
from tutti.strategies import AllReduce, parse
from tutti.transports import Transport
from tutti.transports.base import Operation

REFERENCE_CODEC = "topk:0.0001"
"""It says next to nothing, so that what its steps take is not the link."""

WHOLE_BYTES, NUM_PARTS = 2**30, 8
"""Reference jobs have one bucket, and about so many."""

_LONG_BYTES, _RINGS = 4 * 2**20, 5
_BURSTS, _BURST_S = 5, 0.1
_CROWDS, _CROWDED_S, _CROWDED_STEPS = 3, 0.5, 10


def reference_jobs(model: str, workers: int) -> tuple[str, str]:
    """Jobs that send next to nothing, in one bucket and in several: what they take beyond formulas is overhead."""
    num_bytes = sum(p.nbytes for p in make_benchmark_model(model, workers).model.parameters())
    sizes = (WHOLE_BYTES, max(1, num_bytes // NUM_PARTS))
    one, several = (f"{REFERENCE_CODEC},bucket_bytes={size}" for size in sizes)
    return one, several


@dataclass(frozen=True)
class PlannerInputs:
    """On one rank, with all others at the same."""

    link: tuple[float, float]
    """Bits a second and latency, the same on every rank."""
    coding: float
    """How many times as long as on a core of its own a codec takes: as many ranks as share one."""
    crowding: float
    """The part of computing that is lost while the link is in use, the same on every rank."""
    alone: float
    """How many times as fast the link is while only some ranks send, in pairs, the same on every rank."""
    profile: Profile


def measure_planner_inputs(model: str, transport: Transport) -> PlannerInputs:
    """The link, the codecs and a step of a model, on this rank and its peers, one on each host. Collective."""
    case = make_benchmark_model(model, transport.size)
    link, alone = _busy_link(transport)
    coding = max(1.0, transport.size / len(os.sched_getaffinity(0)))  # All hosts of a lab are on this machine.
    crowding = statistics.median(_crowding(case, link, transport) for _ in range(_CROWDS))
    return PlannerInputs((link.bits_per_s, link.latency_s), coding, crowding, alone, _profile(case, transport))


def profile_with_overhead(
    found: PlannerInputs, workers: int, seconds: Mapping[str, float], jobs: tuple[str, str]
) -> tuple[Profile, Link]:
    """What to predict from: a profile with its overhead, and the link.

    Args:
        seconds: of a step without exchange ("solo"), and of both reference jobs, in turns with whatever else was timed.
        jobs: the names of those, as `reference_jobs` gave them.

    A profile says which part of a step is whose; how long a step takes while all ranks compute, "solo" says.
    """
    link = Link(*found.link)
    own = slowed(found.profile, seconds["solo"] / found.profile.seconds)
    own = replace(
        own, overhead=Overhead(coding_factor=found.coding, contention=found.crowding, uncontended_factor=found.alone)
    )
    return replace(own, overhead=_overhead(own, workers, link, [(job, seconds[job]) for job in jobs])), link


def _overhead(profile: Profile, workers: int, link: Link, jobs: list[tuple[str, float]]) -> Overhead:
    """A line through what both jobs take beyond their formulas, over their buckets: as near as one comes to both that
    neither falls nor begins below nothing."""
    strategies = [parse(text) for text, _ in jobs]
    cluster = Cluster(link=link)
    left_s = [
        max(0.0, taken_s - price(strategy, profile, workers, cluster).step_s)
        for strategy, (_, taken_s) in zip(strategies, jobs, strict=True)
    ]
    few, many = (num_buckets(profile, strategy) for strategy in strategies if isinstance(strategy, AllReduce))
    bucket_s = (left_s[1] - left_s[0]) / (many - few) if many > few else 0.0
    if bucket_s <= 0:
        return replace(profile.overhead, exchange_s=statistics.fmean(left_s))
    if (exchange_s := left_s[0] - few * bucket_s) < 0:
        exchange_s, bucket_s = 0.0, (few * left_s[0] + many * left_s[1]) / (few**2 + many**2)
    return replace(profile.overhead, exchange_s=exchange_s, bucket_s=bucket_s)


def num_buckets(profile: Profile, strategy: AllReduce) -> int:
    """Of a step."""
    return len(bucket_loads(profile, strategy.bucket_bytes, strategy.exact_below if strategy.codec is not None else 0))


def _busy_link(transport: Transport) -> tuple[Link, float]:
    """Latency as in a calibration, and the rate at which all ranks send at once, as they do in a ring.

    And how many times as fast it is in that calibration, in which ranks send in pairs and take turns.
    """
    rate, latency_s = measure_network(transport)["links"]["link"]
    tensor = torch.zeros(_LONG_BYTES // 4)

    def ring_s() -> float:
        start_s = transport.now()
        transport.start(ring.steps(tensor, transport)).wait()
        return transport.now() - start_s

    ring_s()
    taken_s = _slowest(statistics.median(ring_s() for _ in range(_RINGS)), transport)
    sent = 2 * (transport.size - 1) / transport.size * tensor.nbytes
    link = Link(8 * sent / max(taken_s - latency_s, 1e-9), latency_s)
    return link, max(1.0, rate / link.bits_per_s)


def _burst_s(call: Callable[[], Any], transport: Transport) -> float:
    """Of one call while all ranks make them: the slowest rank's, the median of several bursts."""
    bursts = []
    for _ in range(_BURSTS):
        _together(transport)
        bursts.append(_mean_s(call))
    return _slowest(statistics.median(bursts), transport)


def _crowding(case: BenchmarkModel, link: Link, transport: Transport) -> float:
    """Rings behind steps that exchange nothing: what both take together beyond the longer of them, of the shorter."""
    step = solo_step(case)
    step()
    step_s = _burst_s(step, transport)
    tensor = torch.zeros(_LONG_BYTES // 4)
    ring_s = ring.cost(transport.size, tensor.nbytes, link)
    num_rings = max(1, round(max(_CROWDED_S, _CROWDED_STEPS * step_s) / ring_s))
    _together(transport)
    start_s, num_steps = transport.now(), 0
    work = transport.start(_rings(tensor, num_rings, transport))
    while not work.done():
        step()
        num_steps += 1
    work.wait()
    both_s, parts = transport.now() - start_s, (num_rings * ring_s, num_steps * step_s)
    lost = (both_s - max(parts)) / min(parts)
    return statistics.fmean(all_gather_json(min(1.0, max(0.0, lost)), transport))


def _rings(tensor: Tensor, number: int, transport: Transport) -> Operation:
    for _ in range(number):
        yield from ring.steps(tensor, transport)


def _mean_s(call: Callable[[], Any]) -> float:
    """Of as many calls as fit in a burst."""
    start_s, calls = time.perf_counter(), 0
    while (spent_s := time.perf_counter() - start_s) < _BURST_S:
        call()
        calls += 1
    return spent_s / calls


def _profile(case: BenchmarkModel, transport: Transport) -> Profile:
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.001)
    _together(transport)
    return profile_model(case.model, case.batch, loss=case.loss, optimizer=optimizer)


def _together(transport: Transport) -> None:
    """All ranks go on from here at once."""
    run(recursive_doubling.steps(torch.zeros(1), transport))


def _slowest(seconds: float, transport: Transport) -> float:
    return max(all_gather_json(seconds, transport))
