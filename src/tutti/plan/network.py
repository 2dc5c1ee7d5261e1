"""`measure_network`: measure the links between a transport's ranks, and describe them as a cluster."""

import statistics
from math import inf
from typing import Any

import torch

from tutti.cluster import Cluster, Link
from tutti.collectives import ALGORITHMS, Collective, broadcast_json, measure_links
from tutti.measurement import bounded, largest_rate
from tutti.plan.quick_link import quick_link
from tutti.transports import AllReduces, HostsTransport, Transport

_ROUNDS = 30
"""Repetitions of a measurement; the median is used."""

_TYPICAL = ("ring", "tree", "butterfly", "recursive_doubling")
"""Collectives from which the latency of a message is derived. In a collective ranks wait for each other and may share
cores, so that a latency is longer there than between two ranks that do nothing else."""

_SMALL, _LARGE = 2**10, (2**20, 2**24)
"""Sizes in bytes of the sums by which shared memory is measured; the second large one if the first shows no rate."""


def measure_network(transport: Transport, quickly: bool = False) -> dict[str, Any]:
    """Measure the links between hosts and within a host, as far as there are any. Collective.

    Returns the same on every rank: "links" with "link" and "within" as (bits per second, seconds), "hosts", "size", and
    "doubts" with a sentence for every rate that could not be measured.

    Args:
        quickly: take half a second, or a few dozen latencies where they are long (`quick_link`). The rate is then that
            of a ring, not that of the slowest pair.
    """
    links = {}
    if transport.size > 1 and len(set(transport.hosts)) == 1:  # One host: there is no link between hosts.
        links["within"] = _memory(transport, quickly)
    elif isinstance(transport, HostsTransport):
        links["within"] = _memory(transport.within, quickly)
        if transport.across is not None:  # Only the leader of each host has a transport to other hosts.
            links["link"] = _link(transport.across, quickly)
    elif transport.size > 1:
        links["link"] = _link(transport, quickly)
    doubts = []
    if transport.cluster is None:  # Simulated links may have any rate.
        limit = largest_rate()
        for kind, (measured, latency_s) in links.items():
            rate, doubt = bounded(measured, limit)
            links[kind] = rate, latency_s
            doubts += [doubt] if doubt else []
    # Every host measured its own memory, and only leaders the link. All ranks take the values of rank 0, which leads.
    if "within" in links or transport.cluster is None:
        links, doubts = broadcast_json([links, doubts], transport)
    return {"links": links, "hosts": len(set(transport.hosts)), "size": transport.size, "doubts": doubts}


def cluster_with(measured: dict[str, Any], name: str, **more: Any) -> Cluster:
    """Return the cluster that the result of `measure_network` describes.

    More workers get more hosts of the same kind; if there was one host, they share it.
    """
    hosts = measured["hosts"]
    links: dict[str, Any] = {kind: Link(*link) for kind, link in measured["links"].items()}
    # Rounded up, where hosts have different numbers of ranks.
    ranks_per_host = -(-measured["size"] // hosts) if hosts > 1 else None
    return Cluster(name=name, hosts=1 if hosts == 1 else None, ranks_per_host=ranks_per_host, **links, **more)


def _link(transport: Transport, quickly: bool) -> tuple[float, float]:
    """Return bits per second, from long messages, and latency in seconds, from collectives of short ones."""
    if transport.size == 1:
        return 1e11, 0.0  # One rank uses no link: any value will do.
    if quickly:
        return quick_link(transport)
    rate, latencies = measure_links(transport).link.bits_per_s, []
    for name in _TYPICAL:
        # 64 bytes for each rank's block: short enough that only latencies count.
        taken_s = _seconds(ALGORITHMS[name], 16 * transport.size, transport)
        # Without bytes and with a latency of one second, the formula counts the latencies of the critical path.
        num_latencies = ALGORITHMS[name].cost(transport.size, 0, Link("1gbit", 1.0))
        latencies.append(taken_s / num_latencies)
    return rate, statistics.median(latencies)


def _seconds(collective: Collective, numel: int, transport: Transport) -> float:
    """Return rank 0's median seconds of an all-reduce of `numel` numbers, on every rank."""
    tensor, times = torch.zeros(numel, device="cpu"), []
    for _ in range(_ROUNDS):
        start_s = transport.now()
        transport.start(collective.steps(tensor, transport)).wait()
        times.append(transport.now() - start_s)
    return float(broadcast_json(statistics.median(times), transport))


def _memory(transport: Transport, quickly: bool) -> tuple[float, float]:
    """Return the link for which the formula of a sum in shared memory gives the measured times."""
    if not isinstance(transport, AllReduces):
        return _link(transport, quickly)

    def seconds(num_bytes: int) -> float:
        tensor, times = torch.zeros(num_bytes // 4, device="cpu"), []
        for _ in range(_ROUNDS):
            start_s = transport.now()
            transport.all_reduce(tensor).wait()
            times.append(transport.now() - start_s)
        return statistics.median(times)

    small_s = seconds(_SMALL)
    for large in _LARGE:
        # The formula (`tutti.cost.sums`) is 2 (latency + bytes / rate): two barriers, and each byte is read once and
        # written once. Noise can make the difference zero or negative: then there is no rate.
        growth_s = (seconds(large) - small_s) / 2
        rate = 8 * (large - _SMALL) / growth_s if growth_s > 0 else inf
        # Ranks must agree on whether to go on. Simulated memory may have any rate.
        if transport.cluster is not None or broadcast_json(rate <= largest_rate(), transport):
            break
    return rate, small_s / 2
