"""Measure how fast ranks compute and talk, and describe the cluster that does the same in virtual time."""

import statistics
from itertools import pairwise
from typing import Any

import torch

from tutti.cluster import Cluster, Compute, Link
from tutti.collectives import ALGORITHMS, gather_json, measure_links, recursive_doubling, run
from tutti.launch import init
from tutti.launch.link import Link as Reporter
from tutti.recipes import recipe
from tutti.transports import HostsTransport, Transport

_WARM_UP, _ROUNDS = 5, 40

_TYPICAL = ("ring", "tree", "butterfly", "recursive_doubling")
"""What a message's latency is taken from: in collectives ranks wait for each other, and may share cores."""


def measure(name: str, batch_size: int) -> dict[str, Any]:
    """What a `Cluster` needs to know, measured on this rank and its peers; the same on every rank."""
    transport, reporter = init().transport, Reporter()
    reporter.progress(doing="computing")
    found = measure_compute(name, batch_size, transport)
    if transport.size > 1:
        reporter.progress(doing="sending messages")
        found |= measure_network(transport)
    return found


def cluster_of(found: dict[str, Any], name: str = "calibrated") -> Cluster:
    """The cluster that what `measure` found describes."""
    computing_s = found["forward_s"] + found["backward_s"]
    compute = Compute(
        sample_s=computing_s / found["batch_size"], step_s=found["step_s"], forward=found["forward_s"] / computing_s
    )
    links = {kind: Link(*link) for kind, link in found.get("links", {}).items()}
    hosts, size = found.get("hosts", 1), found.get("size", 1)
    return Cluster(
        name=name,
        hosts=hosts,
        ranks_per_host=-(-size // hosts),
        link=links.get("link", Link("10gbit", "50us")),
        within=links.get("within", Link("100gbit", "2us")),
        compute=compute,
    )


def measure_compute(name: str, batch_size: int, transport: Transport) -> dict[str, Any]:
    """All ranks compute at once, as they do in training, and exchange nothing; the slowest rank's seconds."""
    made = recipe(name)
    model = made.model()
    optimizer = made.optimizer(model)
    x, y = made.example(batch_size)
    now, rows = transport.now, []
    for _ in range(_WARM_UP + _ROUNDS):
        _meet(transport)
        times = [now()]
        loss = made.loss(model(x), y)
        times.append(now())
        loss.backward()
        times.append(now())
        optimizer.step()
        optimizer.zero_grad()
        times.append(now())
        rows.append([later - earlier for earlier, later in pairwise(times)])
    everyones = gather_json(rows[_WARM_UP:], transport)
    slowest = [max((mine[number] for mine in everyones), key=sum) for number in range(_ROUNDS)]
    parts = (statistics.median(row[part] for row in slowest) for part in range(3))
    return {**dict(zip(("forward_s", "backward_s", "step_s"), parts, strict=True)), "batch_size": batch_size}


def _meet(transport: Transport) -> None:
    if transport.size > 1:
        run(recursive_doubling.steps(torch.zeros(1), transport))


def measure_network(transport: Transport) -> dict[str, Any]:
    """Rate by ping-pong of long messages; latency by collectives of short ones."""
    links = {}
    between: Transport | None = transport
    if isinstance(transport, HostsTransport):
        between = transport.across
        links["within"] = _link(transport.inner.channel("within", _here(transport)))
    if between is not None:
        links["between"] = _link(between)
    everyones = gather_json(links, transport)
    kinds = {kind for mine in everyones for kind in mine}
    one_host = len(set(transport.hosts)) == 1
    found = {
        "within" if one_host or kind == "within" else "link": next(mine[kind] for mine in everyones if kind in mine)
        for kind in sorted(kinds)
    }
    return {"links": found, "hosts": len(set(transport.hosts)), "size": transport.size}


def _here(transport: Transport) -> list[int]:
    return [rank for rank, host in enumerate(transport.hosts) if host == transport.hosts[transport.rank]]


def _link(transport: Transport) -> tuple[float, float]:
    rate = measure_links(transport).link.bits_per_s
    latencies = []
    for name in _TYPICAL:
        collective = ALGORITHMS[name]
        tensor, times = torch.zeros(16 * transport.size), []
        for _ in range(_ROUNDS):
            start_s = transport.now()
            transport.start(collective.steps(tensor, transport)).wait()
            times.append(transport.now() - start_s)
        latencies.append(statistics.median(times) / collective.cost(transport.size, 0, Link("1gbit", 1.0)))
    return rate, statistics.median(latencies)
