"""The planner's inputs, measured while all ranks train at once on the cores that they share."""

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
from tutti.cost import Placement
from tutti.cost.scaled_profile import slowed
from tutti.plan import Overhead, Profile, price
from tutti.plan.profile import profile as profile_model
from tutti.simulation.runs.calibrate import measure_network
from tutti.strategies import parse
from tutti.transports import Transport
from tutti.transports.base import Operation

REFERENCE_CODEC = "topk:0.0001"
"""A codec that sends almost nothing, so that the link takes no part of a step."""

ONE_BUCKET_BYTES, NUM_BUCKETS = 2**30, 8
"""Bucket size of the first reference job, which has one bucket, and the approximate number of buckets of the second."""

_RING_BYTES, _NUM_RINGS = 4 * 2**20, 5
"""Size of the all-reduces that measure the rate of busy links, a bucket's default, and their number."""
_NUM_BURSTS, _BURST_S = 5, 0.1
"""Number of bursts in which a step is timed, and seconds of each."""
_CONTENTION_ROUNDS, _CONTENTION_S, _CONTENTION_STEPS = 3, 0.5, 10
"""Measurements of contention, and the length of each: seconds or steps, whichever is longer."""


def reference_jobs(model: str, workers: int) -> tuple[str, str]:
    """Strategies that send almost nothing, in one bucket and in several.

    The time that their steps take beyond the cost formula is the overhead of an exchange.
    """
    num_bytes = sum(p.nbytes for p in make_benchmark_model(model, workers).model.parameters())
    sizes = (ONE_BUCKET_BYTES, max(1, num_bytes // NUM_BUCKETS))
    one, several = (f"{REFERENCE_CODEC},bucket_bytes={size}" for size in sizes)
    return one, several


@dataclass(frozen=True)
class PlannerInputs:
    """Measurements of one rank, made while all other ranks made them too."""

    link: tuple[float, float]
    """Bits per second and latency in seconds; the same on every rank."""
    coding_factor: float
    """Factor on the time of a codec, because ranks share cores: the number of ranks per core."""
    contention: float
    """Fraction of the computing speed that is lost while the link is in use; the same on every rank."""
    uncontended_factor: float
    """Factor on the link's rate while only pairs of ranks send; the same on every rank."""
    profile: Profile


def measure_planner_inputs(model: str, transport: Transport) -> PlannerInputs:
    """Measure the link, the contention and a step of a model, with one rank per host. Collective."""
    benchmark = make_benchmark_model(model, transport.size)
    link, uncontended_factor = _busy_link(transport)
    coding_factor = max(1.0, transport.size / len(os.sched_getaffinity(0)))  # All hosts of a lab are on this machine.
    contention = statistics.median(_contention(benchmark, link, transport) for _ in range(_CONTENTION_ROUNDS))
    return PlannerInputs(
        (link.bits_per_s, link.latency_s), coding_factor, contention, uncontended_factor, _profile(benchmark, transport)
    )


def profile_with_overhead(
    inputs: PlannerInputs, workers: int, seconds: Mapping[str, float], jobs: tuple[str, str]
) -> tuple[Profile, Link]:
    """Return the profile to predict from, with its overhead, and the link.

    Args:
        seconds: measured seconds per step without exchange ("solo") and of both reference jobs.
        jobs: the reference jobs, as `reference_jobs` returned them.

    The profile divides a step into its parts. "solo" gives the time of a whole step while all ranks compute.
    """
    link = Link(*inputs.link)
    scaled = slowed(inputs.profile, seconds["solo"] / inputs.profile.seconds)
    # First the overhead that is measured directly: what the formulas then leave unexplained is that per exchange.
    scaled = replace(
        scaled,
        overhead=Overhead(
            coding_factor=inputs.coding_factor,
            contention=inputs.contention,
            uncontended_factor=inputs.uncontended_factor,
        ),
    )
    return replace(scaled, overhead=_overhead(scaled, workers, link, [(job, seconds[job]) for job in jobs])), link


def _overhead(profile: Profile, workers: int, link: Link, jobs: list[tuple[str, float]]) -> Overhead:
    """Return the overhead per exchange and per bucket, from the time of both jobs beyond their cost formulas.

    It is the line through both times over their numbers of buckets. Where that has a negative slope or start, it is
    the nearest line that has not.
    """
    strategies = [parse(text) for text, _ in jobs]
    cluster = Cluster(link=link)
    overhead_s = [
        max(0.0, measured_s - price(strategy, profile, workers, cluster).step_s)
        for strategy, (_, measured_s) in zip(strategies, jobs, strict=True)
    ]
    placement = Placement.from_cluster(workers, cluster)
    few, many = (strategy.cost(profile, placement).num_buckets for strategy in strategies)
    # overhead_s = exchange_s + num_buckets * bucket_s, from two measurements. Both coefficients must be 0 or more.
    bucket_s = (overhead_s[1] - overhead_s[0]) / (many - few) if many > few else 0.0
    if bucket_s <= 0:  # Noise is larger than what buckets cost: a constant, the mean of both.
        return replace(profile.overhead, exchange_s=statistics.fmean(overhead_s))
    if (exchange_s := overhead_s[0] - few * bucket_s) < 0:
        # Least squares through the origin.
        exchange_s, bucket_s = 0.0, (few * overhead_s[0] + many * overhead_s[1]) / (few**2 + many**2)
    return replace(profile.overhead, exchange_s=exchange_s, bucket_s=bucket_s)


def _busy_link(transport: Transport) -> tuple[Link, float]:
    """Return the link with the rate at which all ranks send at once in a ring, and with the latency of a calibration.

    Also returns the rate of the calibration, in which pairs of ranks send in turn, relative to that rate.
    """
    rate, latency_s = measure_network(transport)["links"]["link"]
    tensor = torch.zeros(_RING_BYTES // 4)

    def ring_s() -> float:
        start_s = transport.now()
        transport.start(ring.steps(tensor, transport)).wait()
        return transport.now() - start_s

    ring_s()  # Warms up.
    measured_s = _slowest(statistics.median(ring_s() for _ in range(_NUM_RINGS)), transport)
    # A ring sends 2 (P-1)/P of the tensor. Of its latencies one remains: the others pass while chunks are sent.
    sent_bytes = 2 * (transport.size - 1) / transport.size * tensor.nbytes
    link = Link(8 * sent_bytes / max(measured_s - latency_s, 1e-9), latency_s)
    return link, max(1.0, rate / link.bits_per_s)


def _burst_s(call: Callable[[], Any], transport: Transport) -> float:
    """Return the seconds per call while all ranks call: the median of several bursts, of the slowest rank."""
    bursts = []
    for _ in range(_NUM_BURSTS):
        _barrier(transport)
        bursts.append(_mean_s(call))
    return _slowest(statistics.median(bursts), transport)


def _contention(benchmark: BenchmarkModel, link: Link, transport: Transport) -> float:
    """Measure contention: compute steps while rings run in the background.

    The result is the time that both take together beyond the longer one, as a fraction of the shorter one.
    """
    step = solo_step(benchmark)
    step()  # Warms up.
    step_s = _burst_s(step, transport)
    tensor = torch.zeros(_RING_BYTES // 4)
    # By formula: `link` was measured by the same ring, without computation beside it.
    ring_s = ring.cost(transport.size, tensor.nbytes, link)
    num_rings = max(1, round(max(_CONTENTION_S, _CONTENTION_STEPS * step_s) / ring_s))
    _barrier(transport)
    # Rings run in the background, and steps until they have ended: the link is in use during all steps but the last.
    start_s, num_steps = transport.now(), 0
    work = transport.start(_rings(tensor, num_rings, transport))
    while not work.done():
        step()
        num_steps += 1
    work.wait()
    both_s = transport.now() - start_s
    # With full overlap both take as long as the longer one; with none, as long as their sum. 0 is full, 1 is none.
    shorter_s, longer_s = sorted((num_rings * ring_s, num_steps * step_s))
    contention = (both_s - longer_s) / shorter_s
    return statistics.fmean(all_gather_json(min(1.0, max(0.0, contention)), transport))


def _rings(tensor: Tensor, number: int, transport: Transport) -> Operation:
    """Run so many all-reduces of the same tensor one after the other, as one operation."""
    for _ in range(number):
        yield from ring.steps(tensor, transport)


def _mean_s(call: Callable[[], Any]) -> float:
    """Return the mean seconds of as many calls as fit in a burst, with the one that exceeds it."""
    start_s, calls = time.perf_counter(), 0
    while (spent_s := time.perf_counter() - start_s) < _BURST_S:
        call()
        calls += 1
    return spent_s / calls


def _profile(benchmark: BenchmarkModel, transport: Transport) -> Profile:
    """Profile a step of the model on this rank, while all others do the same."""
    optimizer = torch.optim.SGD(benchmark.model.parameters(), lr=0.001)
    _barrier(transport)  # All ranks profile at the same time, on the cores that they share.
    return profile_model(benchmark.model, benchmark.batch, loss=benchmark.loss, optimizer=optimizer)


def _barrier(transport: Transport) -> None:
    """Wait until all ranks are here."""
    run(recursive_doubling.steps(torch.zeros(1), transport))


def _slowest(seconds: float, transport: Transport) -> float:
    return max(all_gather_json(seconds, transport))
