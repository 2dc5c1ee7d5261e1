"""`measure_network`: measure the links between a transport's ranks, and describe them as a cluster."""

import statistics
from typing import Any

import torch

from tutti.cluster import Cluster, Link
from tutti.collectives import ALGORITHMS, Collective, all_gather_json, broadcast_json, measure_links
from tutti.plan.quick_link import quick_link
from tutti.transports import AllReduces, HostsTransport, Transport

_ROUNDS = 30
"""Repetitions of a measurement; the median is used."""

_TYPICAL = ("ring", "tree", "butterfly", "recursive_doubling")
"""Collectives from which the latency of a message is derived. In a collective ranks wait for each other and may share
cores, so that a latency is longer there than between two ranks that do nothing else."""

_SMALL, _LARGE = 2**10, 2**20
"""Sizes in bytes of the sums by which shared memory is measured."""


def measure_network(transport: Transport, quickly: bool = False) -> dict[str, Any]:
    """Measure the links between hosts and within a host, as far as there are any. Collective.

    Returns the same on every rank: "links" with "link" and "within" as (bits per second, seconds), "hosts" and "size".

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
    # Every host measured its own memory, and only leaders the link. All ranks take the values of rank 0, which leads.
    if "within" in links:
        links = all_gather_json(links, transport)[0]
    return {"links": links, "hosts": len(set(transport.hosts)), "size": transport.size}


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
    medians = []
    for num_bytes in (_SMALL, _LARGE):
        tensor, times = torch.zeros(num_bytes // 4, device="cpu"), []
        for _ in range(_ROUNDS):
            start_s = transport.now()
            transport.all_reduce(tensor).wait()
            times.append(transport.now() - start_s)
        medians.append(statistics.median(times))
    # The formula (`tutti.cost.sums`) is 2 (latency + bytes / rate): two barriers, each byte read once and written once.
    # The floor of 1e-13 s per byte stands for a slope that noise has made zero or negative.
    small_s, large_s = medians
    seconds_per_byte = max(1e-13, (large_s - small_s) / 2 / (_LARGE - _SMALL))
    return 8 / seconds_per_byte, small_s / 2
