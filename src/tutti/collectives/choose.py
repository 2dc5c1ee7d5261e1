"""Choose an all-reduce by what each would cost on the link there is."""

import statistics
from dataclasses import dataclass, replace
from functools import partial

import torch

from tutti.cluster import Link
from tutti.collectives.collective import Collective
from tutti.collectives.hierarchical import hierarchical as hierarchical_steps
from tutti.collectives.links import measure_links
from tutti.collectives.messages import share_json
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
from tutti.transports import AllReduces, Averages, HostsTransport, ProcessGroupTransport, Transport

_FLAT = (ring, ring_blocking, tree, butterfly, recursive_doubling)

_ROUNDS = 15


@dataclass(frozen=True)
class Choice:
    """Collectives to choose from, each with the link that its cost formula should be given."""

    num_ranks: int
    link: Link | None
    """What was measured; None where there was nothing to choose."""
    candidates: tuple[tuple[Collective, Link], ...]

    def costs(self, num_bytes: float) -> dict[str, float]:
        """Predicted seconds of every candidate."""
        return {each.name: each.cost(self.num_ranks, num_bytes, link) for each, link in self.candidates}

    def best(self, num_bytes: float) -> Collective:
        """The candidate with the lowest prediction."""
        return min(self.candidates, key=lambda pair: pair[0].cost(self.num_ranks, num_bytes, pair[1]))[0]


def choices(transport: Transport) -> Choice:
    """Measure the link between ranks, if there is anything to choose, and say what there is. Collective."""
    if transport.size == 1 or isinstance(transport, Averages):  # Shared memory: nothing sends less than it.
        return Choice(transport.size, None, ((native, Link("100gbit")),))  # A rate of no consequence.
    if isinstance(transport, HostsTransport):
        measured = measure_links(transport.across).link if transport.across is not None else None
        link = _rank_0s(measured, transport)
        two_levels = replace(hierarchical, steps=partial(hierarchical_steps, link=link))
        return Choice(len(set(transport.hosts)), link, ((two_levels, link),))
    link = _rank_0s(measure_links(transport).link, transport)
    # Not Gloo's: it is no faster, and a sum of its that has begun cannot be interrupted.
    own = isinstance(transport, AllReduces) and not isinstance(transport, ProcessGroupTransport)
    native_too = (native,) if own else ()
    candidates = tuple((each, as_seen_by(each, transport, link)) for each in (*_FLAT, *native_too))
    return Choice(transport.size, link, candidates)


def _rank_0s(link: Link | None, transport: Transport) -> Link:
    """Rank 0's measurement, on every rank: so that all choose the same."""
    return Link(*share_json([link.bits_per_s, link.latency_s] if link is not None else None, transport))


def as_seen_by(collective: Collective, transport: Transport, link: Link) -> Link:
    """The link, with the latency that this collective's messages have: ranks may share cores, or be slow to wake."""
    tensor, times = torch.zeros(16 * transport.size, device="cpu"), []  # A part for everyone, as in what is to come.
    for _ in range(_ROUNDS):
        start_s = transport.now()
        run(collective.steps(tensor, transport))
        times.append(transport.now() - start_s)
    num_latencies = collective.cost(transport.size, 0, Link("1gbit", 1.0))
    return _rank_0s(Link(link.bits_per_s, statistics.median(times) / num_latencies), transport)
