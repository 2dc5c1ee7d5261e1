"""The transport's own all-reduce."""

from collections.abc import Callable

from torch import Tensor

from tutti.cluster import Link
from tutti.collectives.hierarchical import cheapest, hierarchical
from tutti.collectives.ring import round_cost
from tutti.transports import AllReduces, HostsTransport, SocketTransport, Transport, Work
from tutti.transports.base import Operation


def native(tensor: Tensor, transport: Transport) -> Operation:
    """Sum over ranks, in place, in whatever way the transport does best: by messages, if it has nothing better."""
    if isinstance(transport, HostsTransport):
        yield from hierarchical(tensor, transport)
    elif (all_reduce := native_all_reduce(transport, tensor.device.type)) is not None:
        yield all_reduce(tensor)
    else:
        yield from cheapest(transport.size, tensor.nbytes)(tensor, transport)


def native_all_reduce(transport: Transport, device_type: str) -> Callable[[Tensor], Work] | None:
    """What a transport sums tensors of such devices with, if it is better than messages.

    Gloo is not: it is no faster, and a sum of its that has begun cannot be interrupted.
    """
    by_gloo = isinstance(transport, SocketTransport) and device_type == "cpu"
    return transport.all_reduce if isinstance(transport, AllReduces) and not by_gloo else None


def native_cost(num_ranks: int, num_bytes: float, link: Link) -> float:
    """max(2 (P-1) α, 2 (P-1)/P n β): a ring, as NCCL and MPI use, that waits for latencies while others transfer."""
    transfer = 2 * round_cost(num_ranks, num_bytes, Link(link.bits_per_s))
    return max(2 * round_cost(num_ranks, 0, link), transfer)
