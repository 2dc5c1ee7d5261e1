"""`tutti bench collectives`: every all-reduce algorithm beside its predicted cost, and beside Gloo and Open MPI."""

from functools import partial
from typing import Any

import torch

from tutti.bench.interleaved import Candidates, InterleavedTimer
from tutti.bench.under_mpi import communicator
from tutti.cluster import Link
from tutti.collectives import (
    ALGORITHMS,
    Collective,
    CollectiveChoice,
    link_as_used_by,
    measure_collectives,
    measure_links,
    native_all_reduce,
    run,
)
from tutti.launch import init
from tutti.launch.supervisor_pipe import SupervisorPipe
from tutti.transports import AllReduces, HostsTransport, SharesMemory, Transport

_ROUND_S, _MOST_REPEATS, _SIZE_S = 0.02, 20, 40.0
"""Seconds of one algorithm in one round, most calls in that time, and seconds of all rounds of one size, about."""


def measure(sizes: list[int], rounds: int) -> dict[str, Any]:
    """Time every algorithm at every size in bytes, on all ranks. Returns the same on every rank."""
    transport, reporter = init().transport, SupervisorPipe()
    choice = measure_collectives(transport)
    # It is None where there is nothing to choose from: formulas need one all the same.
    link = choice.link or measure_links(transport).link
    links = _links(transport, link)
    rows = []
    for number, num_bytes in enumerate(sizes):
        reporter.progress(done=number, total=len(sizes))
        # Zeros: other values would overflow, being summed in place again and again.
        candidates = _candidates(torch.zeros(num_bytes // 4), transport, choice)
        seconds = InterleavedTimer(rounds, _ROUND_S, _MOST_REPEATS, _SIZE_S).medians(candidates, transport)
        best = choice.best(num_bytes).name
        rows.append(
            {
                "num_bytes": num_bytes,
                "seconds": seconds,
                "predicted": {name: _predicted(name, num_bytes, transport, links[name]) for name in links},
                "cheapest": best,
            }
        )
    return {
        "workers": transport.size,
        "hosts": len(set(transport.hosts)),
        "link": {"bits_per_s": link.bits_per_s, "latency_s": link.latency_s},
        "rows": rows,
    }


def _candidates(tensor: torch.Tensor, transport: Transport, choice: CollectiveChoice) -> Candidates:
    """Return every algorithm as a function to time, and the all-reduces of Gloo and MPI if they are here."""
    # "cheapest" is what `AllReduce("cheapest")` would take for this size, by the measured link.
    collectives = {**ALGORITHMS, "cheapest": choice.best(tensor.nbytes)}
    candidates: Candidates = {
        name: partial(_run, collective, tensor, transport) for name, collective in collectives.items()
    }
    # Where ranks share memory, "native" sums there. The transport below it has Gloo's all-reduce.
    if isinstance(transport, SharesMemory) and isinstance(transport.inner, AllReduces):
        gloo = transport.inner
        candidates["gloo"] = lambda: gloo.all_reduce(tensor).wait()
    if (mpi_world := communicator()) is not None:
        from mpi4py import MPI

        array = tensor.numpy()
        candidates["mpi"] = lambda: mpi_world.Allreduce(MPI.IN_PLACE, array)
    return candidates


def _run(collective: Collective, tensor: torch.Tensor, transport: Transport) -> None:
    """Sum once, without the comparison of tensors that calling the collective would add."""
    run(collective.steps(tensor, transport))


def _links(transport: Transport, link: Link) -> dict[str, Link]:
    """Return the link for each algorithm's formula: the measured one; for native, as the transport uses it."""
    links = dict.fromkeys(ALGORITHMS, link)
    if native_all_reduce(transport, "cpu") is not None:
        links["native"] = link_as_used_by(ALGORITHMS["native"], transport.size, transport, link)
    return links


def _predicted(name: str, num_bytes: int, transport: Transport, link: Link) -> float:
    """Return the predicted seconds of an algorithm, for the ranks or hosts that it sends between."""
    # Between hosts one rank of each communicates, so the formula counts hosts.
    two_levels = isinstance(transport, HostsTransport) and name in ("hierarchical", "native")
    num_ranks = len(set(transport.hosts)) if two_levels or name == "hierarchical" else transport.size
    by_messages = name == "native" and native_all_reduce(transport, "cpu") is None  # Then it is the cheapest of those.
    return ALGORITHMS["hierarchical" if two_levels or by_messages else name].cost(num_ranks, num_bytes, link)
