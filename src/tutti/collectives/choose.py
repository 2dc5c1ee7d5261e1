"""Choose an all-reduce by what each would cost on the link there is."""

import statistics
from dataclasses import dataclass
from functools import partial

import torch

from tutti.cluster import Link
from tutti.collectives.butterfly import butterfly, butterfly_cost
from tutti.collectives.collective import Collective
from tutti.collectives.doubling import recursive_doubling, recursive_doubling_cost
from tutti.collectives.hierarchical import hierarchical, hierarchical_cost
from tutti.collectives.links import measure_links
from tutti.collectives.messages import share_json
from tutti.collectives.native import native, native_cost
from tutti.collectives.ring import ring, ring_cost
from tutti.collectives.steps import on_flat, run
from tutti.transports import AllReduces, Averages, HostsTransport, Transport

_FLAT = (
    Collective("ring", on_flat(ring), ring_cost),
    Collective("butterfly", on_flat(butterfly), butterfly_cost),
    Collective("recursive_doubling", on_flat(recursive_doubling), recursive_doubling_cost),
)

_NATIVE_ROUNDS = 9


@dataclass(frozen=True)
class Choice:
    """Collectives to choose from, each with the link that its cost formula should be given."""

    num_ranks: int
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
        return Choice(transport.size, ((Collective("native", native, native_cost), Link("100gbit")),))
    if isinstance(transport, HostsTransport):
        measured = measure_links(transport.across).link if transport.across is not None else None
        link = _rank_0s(measured, transport)
        two_levels = Collective("hierarchical", partial(hierarchical, link=link), hierarchical_cost)
        return Choice(len(set(transport.hosts)), ((two_levels, link),))
    link = _rank_0s(measure_links(transport).link, transport)
    candidates = [(each, link) for each in _FLAT]
    if isinstance(transport, AllReduces):
        candidates.append((Collective("native", native, native_cost), _native_link(transport, link)))
    return Choice(transport.size, tuple(candidates))


def _rank_0s(link: Link | None, transport: Transport) -> Link:
    """Rank 0's measurement, on every rank: so that all choose the same."""
    return Link(*share_json([link.bits_per_s, link.latency_s] if link is not None else None, transport))


def _native_link(transport: Transport, link: Link) -> Link:
    """The link as the transport's own all-reduce sees it: its messages start sooner than ours, or later."""
    tensor, times = torch.zeros(16, device="cpu"), []
    for _ in range(_NATIVE_ROUNDS):
        start_s = transport.now()
        run(native(tensor, transport))
        times.append(transport.now() - start_s)
    per_message = statistics.median(times) / (2 * (transport.size - 1))
    return _rank_0s(Link(link.bits_per_s, per_message), transport)
