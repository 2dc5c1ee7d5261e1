"""What the planner goes by, measured where ranks train: all of them at once, on the cores that they share."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tutti.bench.calibrate import measure_network
from tutti.bench.step import Case, make_case
from tutti.cluster import Cluster, Link
from tutti.codecs import ErrorFeedback, OneBit
from tutti.collectives import gather_json, recursive_doubling, ring, run
from tutti.plan import Overhead, Profile, measure, price
from tutti.plan.coding import coding_seconds
from tutti.plan.loads import loads_of, slowed
from tutti.strategies import AllReduce, parse
from tutti.transports import Transport

REFERENCE_CODEC = "topk:0.0001"
"""It says next to nothing, so that what its steps take is not the link."""

WHOLE_BYTES, NUM_PARTS = 2**30, 8
"""Reference jobs have one bucket, and about so many."""

_LONG_BYTES, _RINGS = 4 * 2**20, 5
_CODED_NUMEL, _BURSTS, _BURST_S = 2**20, 5, 0.1


def references(model: str, workers: int) -> tuple[str, str]:
    """Jobs that send next to nothing, in one bucket and in several: what they take beyond formulas is overhead."""
    num_bytes = sum(p.nbytes for p in make_case(model, workers).model.parameters())
    sizes = (WHOLE_BYTES, max(1, num_bytes // NUM_PARTS))
    one, several = (f"native:bucket_bytes={size}+{REFERENCE_CODEC}" for size in sizes)
    return one, several


@dataclass(frozen=True)
class Measured:
    """On one rank, with all others at the same."""

    link: tuple[float, float]
    """Bits a second and latency, the same on every rank."""
    coding: float
    """How many times as long as on a core of its own a codec takes, the same on every rank."""
    profile: Profile


def measure_place(model: str, transport: Transport) -> Measured:
    """The link, the codecs and a step of a model, on this rank and its peers, one on each host. Collective."""
    case = make_case(model, transport.size)
    return Measured(_busy_link(transport), _coding(transport), _profile(case, transport))


def basis(found: Measured, workers: int, seconds: Mapping[str, float], jobs: tuple[str, str]) -> tuple[Profile, Link]:
    """What to predict from: a profile with its overhead, and the link.

    Args:
        seconds: of a step without exchange ("solo"), and of both reference jobs, in turns with whatever else was timed.
        jobs: the names of those, as `references` gave them.

    A profile says which part of a step is whose; how long a step takes while all ranks compute, "solo" says.
    """
    link = Link(*found.link)
    own = slowed(found.profile, seconds["solo"] / found.profile.seconds)
    own = replace(own, overhead=Overhead(coding=found.coding))
    return replace(own, overhead=_overhead(own, workers, link, [(job, seconds[job]) for job in jobs])), link


def _overhead(profile: Profile, workers: int, link: Link, jobs: list[tuple[str, float]]) -> Overhead:
    """A line through what both jobs take beyond their formulas, over their buckets; a level one if it would fall."""
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
    return replace(profile.overhead, exchange_s=max(0.0, left_s[0] - few * bucket_s), bucket_s=bucket_s)


def num_buckets(profile: Profile, strategy: AllReduce) -> int:
    """Of a step."""
    return len(loads_of(profile, strategy.bucket_bytes, strategy.exact_below if strategy.codec is not None else 0))


def _busy_link(transport: Transport) -> tuple[float, float]:
    """Latency as in a calibration, and the rate at which all ranks send at once, as they do in a ring."""
    _, latency_s = measure_network(transport)["links"]["link"]
    tensor = torch.zeros(_LONG_BYTES // 4)

    def ring_s() -> float:
        start_s = transport.now()
        transport.start(ring.steps(tensor, transport)).wait()
        return transport.now() - start_s

    ring_s()
    taken_s = _slowest(statistics.median(ring_s() for _ in range(_RINGS)), transport)
    sent = 2 * (transport.size - 1) / transport.size * tensor.nbytes
    return 8 * sent / max(taken_s - latency_s, 1e-9), latency_s


def _coding(transport: Transport) -> float:
    """One codec, encoding and decoding on all ranks, beside what it takes on a core of its own."""
    codec, values = ErrorFeedback(OneBit()), torch.randn(_CODED_NUMEL // 1024, 1024)
    state, out = codec.start(_CODED_NUMEL), torch.empty_like(values)

    def code() -> None:
        nonlocal state
        packet, state = codec.encode(values, state)
        codec.decode(packet, out)

    code()  # Compiled first.
    bursts = []
    for _ in range(_BURSTS):
        _together(transport)
        bursts.append(_mean_s(code))
    return _slowest(statistics.median(bursts), transport) / coding_seconds(codec, _CODED_NUMEL, 1, 1)


def _mean_s(call: Callable[[], Any]) -> float:
    """Of as many calls as fit in a burst."""
    start_s, calls = time.perf_counter(), 0
    while (spent_s := time.perf_counter() - start_s) < _BURST_S:
        call()
        calls += 1
    return spent_s / calls


def _profile(case: Case, transport: Transport) -> Profile:
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.001)
    _together(transport)
    return measure.profile(case.model, case.batch, loss=case.loss, optimizer=optimizer)


def _together(transport: Transport) -> None:
    """All ranks go on from here at once."""
    run(recursive_doubling.steps(torch.zeros(1), transport))


def _slowest(seconds: float, transport: Transport) -> float:
    return max(gather_json(seconds, transport))
