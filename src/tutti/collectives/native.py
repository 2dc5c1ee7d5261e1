"""The transport's own all-reduce: shared memory, NCCL or MPI; by messages where there is none better."""

from collections.abc import Callable

from torch import Tensor

from tutti.cluster import Link
from tutti.collectives.hierarchical import cheapest, hierarchical
from tutti.collectives.ring import round_cost
from tutti.transports import AllReduces, HostsTransport, SocketTransport, Transport, Work
from tutti.transports.base import Operation


def native(tensor: Tensor, transport: Transport) -> Operation:
    """Sum over ranks, in place, by the best means of the transport.

    These are two levels where ranks share hosts, else the transport's own all-reduce, else the cheapest algorithm that
    sends messages.
    """
    if isinstance(transport, HostsTransport):
        yield from hierarchical(tensor, transport)
    elif (all_reduce := native_all_reduce(transport, tensor.device.type)) is not None:
        yield all_reduce(tensor)
    else:
        # For the typical link, as nothing was measured here. All ranks choose alike, from the same numbers.
        yield from cheapest(transport.size, tensor.nbytes)(tensor, transport)


def native_all_reduce(transport: Transport, device_type: str) -> Callable[[Tensor], Work] | None:
    """Return the transport's own all-reduce for tensors of such devices, if it is better than messages.

    Gloo's is not used: it is no faster, and once begun it cannot be interrupted when a rank is lost.
    """
    by_gloo = isinstance(transport, SocketTransport) and device_type == "cpu"
    return transport.all_reduce if isinstance(transport, AllReduces) and not by_gloo else None


def native_cost(num_ranks: int, num_bytes: float, link: Link) -> float:
    """max(2 (P-1) α, 2 (P-1)/P n β) seconds: a pipelined ring, as NCCL and MPI use for long tensors.

    Latencies and transfers overlap, so the longer of the two counts.
    """
    # A link without latency, so that only bytes count here.
    transfer = 2 * round_cost(num_ranks, num_bytes, Link(link.bits_per_s))
    return max(2 * round_cost(num_ranks, 0, link), transfer)
