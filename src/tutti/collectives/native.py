"""The transport's own all-reduce."""

from torch import Tensor

from tutti.cluster import Link
from tutti.collectives.hierarchical import hierarchical
from tutti.collectives.ring import ring, ring_cost
from tutti.collectives.steps import on_flat
from tutti.transports import AllReduces, HostsTransport, Transport
from tutti.transports.base import Steps


def native(tensor: Tensor, transport: Transport) -> Steps:
    """Sum over ranks, in place, in whatever way the transport does best."""
    if isinstance(transport, HostsTransport):
        yield from hierarchical(tensor, transport)
    elif isinstance(transport, AllReduces):
        yield transport.all_reduce(tensor)
    else:  # What Gloo and NCCL do.
        yield from on_flat(ring)(tensor, transport)


def native_cost(num_ranks: int, num_bytes: float, link: Link) -> float:
    """max(2 (P-1) α, 2 (P-1)/P n β): a ring, as Gloo and NCCL use, that waits for latencies while others transfer."""
    transfer = ring_cost(num_ranks, num_bytes, Link(link.bits_per_s))
    return max(ring_cost(num_ranks, 0, link), transfer)
