"""Every all-reduce beside Gloo's and Open MPI's own and beside what its formula predicts, over message sizes."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tutti.bench.under_mpi import communicator
from tutti.cluster import Link
from tutti.collectives import (
    ALGORITHMS,
    Choice,
    Collective,
    as_seen_by,
    choices,
    gather_json,
    measure_links,
    recursive_doubling,
    run,
)
from tutti.launch import init
from tutti.launch.link import Link as Reporter
from tutti.transports import AllReduces, HostsTransport, SharesMemory, Transport

ROUND_S, MAX_PER_ROUND = 0.02, 20
"""A round repeats a way for about so long, and not more often than that."""

SIZE_S, MIN_ROUNDS = 40.0, 3
"""One size takes no longer than about this, as far as a few rounds allow."""

Ways = dict[str, Callable[[], Any]]


def measure(sizes: list[int], rounds: int) -> dict[str, Any]:
    """Time every algorithm at every size, on this rank and its peers; the same result on every rank."""
    transport, reporter = init().transport, Reporter()
    choice = choices(transport)
    link = choice.link or measure_links(transport).link
    links = _links(transport, link)
    rows = []
    for number, num_bytes in enumerate(sizes):
        reporter.progress(done=number, total=len(sizes))
        ways = _ways(torch.zeros(num_bytes // 4), transport, choice)
        seconds = _interleaved(ways, transport, rounds)
        best = choice.best(num_bytes).name
        rows.append(
            {
                "num_bytes": num_bytes,
                "seconds": seconds,
                "predicted": {name: _predicted(name, num_bytes, transport, links[name]) for name in links},
                "auto": best,
            }
        )
    return {
        "workers": transport.size,
        "hosts": len(set(transport.hosts)),
        "link": {"bits_per_s": link.bits_per_s, "latency_s": link.latency_s},
        "rows": rows,
    }


def _ways(tensor: torch.Tensor, transport: Transport, choice: Choice) -> Ways:
    collectives = {**ALGORITHMS, "auto": choice.best(tensor.nbytes)}
    ways: Ways = {name: partial(_take, each, tensor, transport) for name, each in collectives.items()}
    if isinstance(transport, SharesMemory) and isinstance(transport.inner, AllReduces):
        gloo = transport.inner
        ways["gloo"] = lambda: gloo.all_reduce(tensor).wait()
    if (everyone := communicator()) is not None:
        from mpi4py import MPI

        array = tensor.numpy()
        ways["mpi"] = lambda: everyone.Allreduce(MPI.IN_PLACE, array)
    return ways


def _take(collective: Collective, tensor: torch.Tensor, transport: Transport) -> None:
    run(collective.steps(tensor, transport))


def _links(transport: Transport, link: Link) -> dict[str, Link]:
    """The link as measured; but the transport's own messages have a latency of their own."""
    links = dict.fromkeys(ALGORITHMS, link)
    if isinstance(transport, AllReduces):
        links["native"] = as_seen_by(ALGORITHMS["native"], transport.size, transport, link)
    return links


def _predicted(name: str, num_bytes: int, transport: Transport, link: Link) -> float:
    two_levels = name == "hierarchical" or (name == "native" and isinstance(transport, HostsTransport))
    num_ranks = len(set(transport.hosts)) if two_levels else transport.size
    return ALGORITHMS["hierarchical" if two_levels else name].cost(num_ranks, num_bytes, link)


def _interleaved(ways: Ways, transport: Transport, rounds: int) -> dict[str, float]:
    """Median over rounds of the slowest rank's seconds; all ways in turn, so that noise is noise to all of them."""
    first = _times(ways, transport, dict.fromkeys(ways, 1))
    guess = {name: max(seconds) for name, seconds in _by_way(first, ways, transport).items()}
    repeats = {name: max(1, min(MAX_PER_ROUND, int(ROUND_S / guess[name]))) for name in ways}
    per_round = sum(guess[name] * repeats[name] for name in ways)
    rounds = max(MIN_ROUNDS, min(rounds, int(SIZE_S / per_round)))
    samples = []
    for number in range(rounds):  # Each time another begins: what follows a certain one may suffer from it.
        names = list(ways)
        turned = {name: ways[name] for name in names[number % len(names) :] + names[: number % len(names)]}
        samples.append(_by_way(_times(turned, transport, repeats), turned, transport))
    return {name: statistics.median(max(sample[name]) for sample in samples) for name in ways}


def _times(ways: Ways, transport: Transport, repeats: dict[str, int]) -> list[float]:
    times = []
    for name, way in ways.items():
        run(recursive_doubling.steps(torch.zeros(1), transport))  # All start together.
        start = transport.now()
        for _ in range(repeats[name]):
            way()
        times.append((transport.now() - start) / repeats[name])
    return times


def _by_way(times: list[float], ways: Ways, transport: Transport) -> dict[str, list[float]]:
    """Every rank's seconds, the same on all ranks."""
    everyones = gather_json(times, transport)
    return {name: [mine[number] for mine in everyones] for number, name in enumerate(ways)}
