"""Two levels: inside a host by shared memory, between hosts by one leader of each."""

from torch import Tensor

from tutti.cluster import Link
from tutti.collectives.butterfly import butterfly, butterfly_cost
from tutti.collectives.doubling import recursive_doubling, recursive_doubling_cost
from tutti.collectives.ring import ring, ring_cost
from tutti.collectives.steps import FlatSteps, on_flat
from tutti.collectives.tree import broadcast
from tutti.transports import AllReduces, Broadcasts, HostsTransport, Transport
from tutti.transports.base import Operation

TYPICAL_LINK = Link("1gbit", "100us")
"""What a leader assumes of the network between hosts to choose its algorithm, where nobody has measured it."""


def hierarchical(tensor: Tensor, transport: Transport, link: Link = TYPICAL_LINK) -> Operation:
    """Sum over ranks, in place: over each host, over one leader of each host, and back to all of the host.

    Over the network goes what one rank per host would send: the "hybrid all-reduce" of Jia et al. 2018. Where no two
    ranks share a host, or all do, one level is left.
    """
    if not isinstance(transport, HostsTransport):
        within, across = (transport, None) if len(set(transport.hosts)) == 1 else (None, transport)
    else:
        within, across = transport.within, transport.across
    if within is not None:
        yield from sum_within(tensor, within)
    if across is not None:
        yield from cheapest(across.size, tensor.nbytes, link)(tensor, across)
    if within is not None and within is not transport:
        yield from broadcast_within(tensor, within)


def hierarchical_cost(num_hosts: int, num_bytes: float, link: Link) -> float:
    """What the cheapest of butterfly, ring and recursive doubling costs between `num_hosts`: memory is not counted."""
    return min(cost(num_hosts, num_bytes, link) for _, cost in _ACROSS)


_ACROSS = ((ring, ring_cost), (butterfly, butterfly_cost), (recursive_doubling, recursive_doubling_cost))


def cheapest(num_ranks: int, num_bytes: int, link: Link = TYPICAL_LINK) -> FlatSteps:
    """The sum over ranks that costs least between hosts of their own."""
    return on_flat(min(_ACROSS, key=lambda pair: pair[1](num_ranks, num_bytes, link))[0])


def sum_within(tensor: Tensor, within: Transport) -> Operation:
    """Sum over the ranks of a host, in place."""
    if isinstance(within, AllReduces):
        yield within.all_reduce(tensor)
    else:
        yield from on_flat(butterfly)(tensor, within)


def broadcast_within(tensor: Tensor, within: Transport) -> Operation:
    """Give the ranks of a host what its first has."""
    if isinstance(within, Broadcasts):
        yield within.broadcast(tensor)
    else:
        yield from on_flat(broadcast)(tensor, within)
