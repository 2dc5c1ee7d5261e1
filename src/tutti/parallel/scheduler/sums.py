"""Sums of small tensors over ranks, with the same bits on every rank."""

from collections.abc import Callable

from torch import Tensor

from tutti.collectives import native, recursive_doubling, run
from tutti.transports import AllReduces, HostsTransport, Transport


def sum_function(transport: Transport) -> Callable[[Tensor], None]:
    """Return a function that sums a tensor over ranks in place. Collective, and bitwise the same on all ranks.

    Transports with an all-reduce of their own use it. Others use recursive doubling, which needs the fewest messages.
    """
    if transport.size == 1:
        return lambda tensor: None
    # The same bits everywhere is what the scheduler relies on: both add in one order on all ranks, or compute once and
    # copy.
    has_all_reduce = isinstance(transport, AllReduces | HostsTransport)
    collective = native if has_all_reduce else recursive_doubling
    return lambda tensor: run(collective.steps(tensor, transport))
