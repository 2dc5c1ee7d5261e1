"""The links that ranks have, measured between them."""

import statistics
from typing import Any

import torch

from tutti.cluster import Cluster, Link
from tutti.collectives import ALGORITHMS, Collective, all_gather_json, broadcast_json, measure_links
from tutti.plan.quick_link import quick_link
from tutti.transports import AllReduces, HostsTransport, Transport

_ROUNDS = 30

_TYPICAL = ("ring", "tree", "butterfly", "recursive_doubling")
"""What a message's latency is taken from: in collectives ranks wait for each other, and may share cores."""

_SMALL, _LARGE = 2**10, 2**20
"""Bytes of sums in memory."""


def measure_network(transport: Transport, quickly: bool = False) -> dict[str, Any]:
    """The links between hosts and within one, as far as there are any; the same on every rank. Collective.

    `quickly` takes half a second, or where latencies are long a few dozen of them (`quick_link`): the rate is then that
    of a ring, and not the slowest link's of all pairs.
    """
    links = {}
    if transport.size > 1 and len(set(transport.hosts)) == 1:
        links["within"] = _memory(transport, quickly)
    elif isinstance(transport, HostsTransport):
        links["within"] = _memory(transport.within, quickly)
        links |= {"link": _link(transport.across, quickly)} if transport.across is not None else {}
    elif transport.size > 1:
        links["link"] = _link(transport, quickly)
    if "within" in links:  # Rank 0 is the first of its host: it knows both. Else all know the same.
        links = all_gather_json(links, transport)[0]
    return {"links": links, "hosts": len(set(transport.hosts)), "size": transport.size}


def cluster_with(found: dict[str, Any], name: str, **more: Any) -> Cluster:
    """The cluster that what `measure_network` found describes.

    More workers would get more hosts of this kind; but where only memory was measured, they would share it.
    """
    hosts = found["hosts"]
    links: dict[str, Any] = {kind: Link(*link) for kind, link in found["links"].items()}
    each = -(-found["size"] // hosts) if hosts > 1 else None
    return Cluster(name=name, hosts=1 if hosts == 1 else None, ranks_per_host=each, **links, **more)


def _link(transport: Transport, quickly: bool) -> tuple[float, float]:
    """Rate by long messages, to and fro or round a ring; latency by collectives of short ones."""
    if transport.size == 1:
        return 1e11, 0.0  # The only one of its host: of no consequence.
    if quickly:
        return quick_link(transport)
    rate, latencies = measure_links(transport).link.bits_per_s, []
    for name in _TYPICAL:
        taken_s = _seconds(ALGORITHMS[name], 16 * transport.size, transport)
        latencies.append(taken_s / ALGORITHMS[name].cost(transport.size, 0, Link("1gbit", 1.0)))
    return rate, statistics.median(latencies)


def _seconds(collective: Collective, numel: int, transport: Transport) -> float:
    """The median of sums of so many numbers, rank 0's, on every rank."""
    tensor, times = torch.zeros(numel, device="cpu"), []
    for _ in range(_ROUNDS):
        start_s = transport.now()
        transport.start(collective.steps(tensor, transport)).wait()
        times.append(transport.now() - start_s)
    return float(broadcast_json(statistics.median(times), transport))


def _memory(transport: Transport, quickly: bool) -> tuple[float, float]:
    """The link of which a sum in memory takes two latencies, and twice the bytes."""
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
    per_byte = max(1e-13, (medians[1] - medians[0]) / 2 / (_LARGE - _SMALL))
    return 8 / per_byte, medians[0] / 2
