"""Choice of an all-reduce algorithm by its predicted cost on the measured link.

`measure_collectives` measures the link once. `CollectiveChoice.best` then chooses for any number of bytes, without
sending anything. All ranks use rank 0's measurement, so they all choose the same algorithm; different choices would
deadlock.
"""

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
"""Repetitions of a short all-reduce, of which the median is taken."""


class Candidate(NamedTuple):
    """A collective with the arguments of its cost formula."""

    collective: Collective
    num_ranks: int
    """Number of ranks, or of hosts for the two-level algorithm."""
    link: Link
    """The link as this collective uses it."""

    def cost(self, num_bytes: float) -> float:
        """Return the predicted seconds for so many bytes."""
        return self.collective.cost(self.num_ranks, num_bytes, self.link)


@dataclass(frozen=True)
class CollectiveChoice:
    """The collectives that a transport can choose from, with what was measured."""

    link: Link | None
    """The measured link between ranks or hosts; None where there was nothing to choose."""
    candidates: tuple[Candidate, ...]

    def costs(self, num_bytes: float) -> dict[str, float]:
        """Return the predicted seconds of every candidate, by its name."""
        return {candidate.collective.name: candidate.cost(num_bytes) for candidate in self.candidates}

    def best(self, num_bytes: float) -> Collective:
        """Return the collective with the lowest predicted cost."""
        return min(self.candidates, key=lambda candidate: candidate.cost(num_bytes)).collective


def measure_collectives(transport: Transport) -> CollectiveChoice:
    """Measure the link between ranks, if there is more than one algorithm to choose from. Collective."""
    if transport.size == 1 or isinstance(transport, Averages):  # Shared memory: no message is cheaper.
        # The rate is never compared, because there is one candidate.
        return CollectiveChoice(None, (Candidate(native, transport.size, Link("100gbit")),))
    two_levels = isinstance(transport, HostsTransport)
    between = transport.across if isinstance(transport, HostsTransport) else transport
    # Ranks that are no leaders have not measured: they take part in the broadcast only.
    link = _link_of_rank_0(measure_links(between).link if between is not None else None, transport)
    # Ranks that share a host share its link, except under the two-level algorithm, where one of them uses it.
    share = Link(link.bits_per_s / max(Counter(transport.hosts).values()), link.latency_s)
    candidates = [
        Candidate(flat, transport.size, link_as_used_by(flat, transport.size, transport, share)) for flat in _FLAT
    ]
    if two_levels:
        num_hosts = len(set(transport.hosts))
        # Leaders choose their algorithm by the measured link instead of a typical one.
        informed = replace(hierarchical, steps=partial(hierarchical_steps, link=link))
        candidates.append(Candidate(informed, num_hosts, link_as_used_by(informed, num_hosts, transport, link)))
    elif native_all_reduce(transport, "cpu") is not None:
        candidates.append(Candidate(native, transport.size, link_as_used_by(native, transport.size, transport, link)))
    return CollectiveChoice(link, tuple(candidates))


def _link_of_rank_0(link: Link | None, transport: Transport) -> Link:
    """Return rank 0's link on every rank, so that all ranks choose the same algorithm."""
    return Link(*broadcast_json([link.bits_per_s, link.latency_s] if link is not None else None, transport))


def link_as_used_by(collective: Collective, num_ranks: int, transport: Transport, link: Link) -> Link:
    """Return the link with the latency that messages of this collective have. Collective.

    It may be more than the link's own, because ranks share cores or take time to wake up. The collective is run with a
    short tensor, and the time is divided by the number of latencies in its cost formula.

    Args:
        num_ranks: number of ranks or hosts that the cost formula is given.
    """
    tensor, times = torch.zeros(16 * transport.size, device="cpu"), []  # Every rank has a part.
    # The median: a rank that wakes up late once must not decide the algorithm of the whole run.
    for _ in range(_ROUNDS):
        start_s = transport.now()
        run(collective.steps(tensor, transport))
        times.append(transport.now() - start_s)
    # Without bytes and with a latency of one second, the formula counts latencies.
    num_latencies = collective.cost(num_ranks, 0, Link("1gbit", 1.0))
    return _link_of_rank_0(Link(link.bits_per_s, statistics.median(times) / num_latencies), transport)
