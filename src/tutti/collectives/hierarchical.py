"""Two-level all-reduce: within each host by shared memory, between hosts by one leader rank each.

```
host A                 host B
ranks 0 1 2            ranks 3 4 5
sum of the host → 0    sum of the host → 3       1. within each host, in shared memory
               0 ↔ 3                             2. between leaders, by the cheapest algorithm
0 → 1 2                3 → 4 5                   3. within each host
```

The network carries what one rank per host would send: the "hybrid all-reduce" of Jia et al. 2018.
"""

from torch import Tensor

from tutti.cluster import Link
from tutti.collectives.butterfly import butterfly, butterfly_cost
from tutti.collectives.doubling import recursive_doubling, recursive_doubling_cost
from tutti.collectives.ring import ring, ring_cost
from tutti.collectives.steps import FlatCollective, on_flat
from tutti.collectives.tree import broadcast
from tutti.transports import AllReduces, Broadcasts, HostsTransport, Transport
from tutti.transports.base import Operation

TYPICAL_LINK = Link("1gbit", "100us")
"""Link that leaders assume between hosts when they choose an algorithm and nobody has measured the real one."""


def hierarchical(tensor: Tensor, transport: Transport, link: Link = TYPICAL_LINK) -> Operation:
    """Sum over ranks, in place: within each host, between the leaders of hosts, and back to all ranks of each host.

    Where no two ranks share a host, or all do, only one of the two levels is left.

    Args:
        link: the link between hosts, by which leaders choose their algorithm. All leaders need the same one.
    """
    if not isinstance(transport, HostsTransport):
        within, across = (transport, None) if len(set(transport.hosts)) == 1 else (None, transport)
    else:
        within, across = transport.within, transport.across
    if within is not None:
        yield from sum_within(tensor, within)
    if across is not None:
        # Leaders only. The other ranks of the host wait for their leader in the broadcast below.
        yield from cheapest(across.size, tensor.nbytes, link)(tensor, across)
    # With one level only, the sum within the host is already on all ranks.
    if within is not None and within is not transport:
        yield from broadcast_within(tensor, within)


def hierarchical_cost(num_hosts: int, num_bytes: float, link: Link) -> float:
    """Seconds of the cheapest of ring, butterfly and recursive doubling between `num_hosts`. Memory is not counted."""
    return min(cost(num_hosts, num_bytes, link) for _, cost in _ACROSS)


# Without the tree: recursive doubling sends at most as many messages of the same length.
_ACROSS = ((ring, ring_cost), (butterfly, butterfly_cost), (recursive_doubling, recursive_doubling_cost))


def cheapest(num_ranks: int, num_bytes: int, link: Link = TYPICAL_LINK) -> FlatCollective:
    """Return the all-reduce that costs least for ranks on hosts of their own. It is the same on every rank."""
    return on_flat(min(_ACROSS, key=lambda pair: pair[1](num_ranks, num_bytes, link))[0])


def sum_within(tensor: Tensor, within: Transport) -> Operation:
    """Sum over the ranks of one host, in place."""
    if isinstance(within, AllReduces):
        yield within.all_reduce(tensor)
    else:
        yield from on_flat(butterfly)(tensor, within)


def broadcast_within(tensor: Tensor, within: Transport) -> Operation:
    """Broadcast from the leader of a host, its first rank, to the others."""
    if isinstance(within, Broadcasts):
        yield within.broadcast(tensor)
    else:
        yield from on_flat(broadcast)(tensor, within)
