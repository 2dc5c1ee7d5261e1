"""Choose an all-reduce by what each would cost on the link there is."""

import statistics
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from tutti.cluster import Link
from tutti.collectives.collective import Collective
from tutti.collectives.hierarchical import hierarchical as hierarchical_steps
from tutti.collectives.links import measure_links
from tutti.collectives.messages import broadcast_json
from tutti.collectives.native import native_all_reduce
from tutti.collectives.registry import (
    butterfly,
    hierarchical,
    native,
    recursive_doubling,
    ring,
    ring_blocking,
    tree,
)
from tutti.collectives.steps import run
from tutti.transports import Averages, HostsTransport, Transport

_FLAT = (ring, ring_blocking, tree, butterfly, recursive_doubling)

_ROUNDS = 15


class Candidate(NamedTuple):
    """A collective, and what its cost formula should be given."""

    collective: Collective
    num_ranks: int
    link: Link

    def cost(self, num_bytes: float) -> float:
        return self.collective.cost(self.num_ranks, num_bytes, self.link)


@dataclass(frozen=True)
class CollectiveChoice:
    """Collectives to choose from."""

    link: Link | None
    """What was measured; None where there was nothing to choose."""
    candidates: tuple[Candidate, ...]

    def costs(self, num_bytes: float) -> dict[str, float]:
        """Predicted seconds of every candidate."""
        return {each.collective.name: each.cost(num_bytes) for each in self.candidates}

    def best(self, num_bytes: float) -> Collective:
        """The candidate with the lowest prediction."""
        return min(self.candidates, key=lambda each: each.cost(num_bytes)).collective


def measure_collectives(transport: Transport) -> CollectiveChoice:
    """Measure the link between ranks, if there is anything to choose, and say what there is. Collective."""
    if transport.size == 1 or isinstance(transport, Averages):  # Shared memory: nothing sends less than it.
        return CollectiveChoice(None, (Candidate(native, transport.size, Link("100gbit")),))
    two_levels = isinstance(transport, HostsTransport)
    between = transport.across if isinstance(transport, HostsTransport) else transport
    link = _rank_0s(measure_links(between).link if between is not None else None, transport)
    # Ranks that share a host share its link, unless only one of them uses it.
    share = Link(link.bits_per_s / max(Counter(transport.hosts).values()), link.latency_s)
    candidates = [
        Candidate(each, transport.size, link_as_used_by(each, transport.size, transport, share)) for each in _FLAT
    ]
    if two_levels:
        num_hosts = len(set(transport.hosts))
        informed = replace(hierarchical, steps=partial(hierarchical_steps, link=link))
        candidates.append(Candidate(informed, num_hosts, link_as_used_by(informed, num_hosts, transport, link)))
    elif native_all_reduce(transport, "cpu") is not None:
        candidates.append(Candidate(native, transport.size, link_as_used_by(native, transport.size, transport, link)))
    return CollectiveChoice(link, tuple(candidates))


def _rank_0s(link: Link | None, transport: Transport) -> Link:
    """Rank 0's measurement, on every rank: so that all choose the same."""
    return Link(*broadcast_json([link.bits_per_s, link.latency_s] if link is not None else None, transport))


def link_as_used_by(collective: Collective, num_ranks: int, transport: Transport, link: Link) -> Link:
    """The link, with the latency that this collective's messages have: ranks may share cores, or be slow to wake.

    `num_ranks` are those that its cost formula counts.
    """
    tensor, times = torch.zeros(16 * transport.size, device="cpu"), []  # A part for everyone, as in what is to come.
    for _ in range(_ROUNDS):
        start_s = transport.now()
        run(collective.steps(tensor, transport))
        times.append(transport.now() - start_s)
    num_latencies = collective.cost(num_ranks, 0, Link("1gbit", 1.0))
    return _rank_0s(Link(link.bits_per_s, statistics.median(times) / num_latencies), transport)
