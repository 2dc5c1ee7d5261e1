"""Two-level transport: shared memory within each host, messages between hosts.

How it works
------------
`HostsTransport` wraps a message transport (`inner`) that joins all ranks. It opens two channels on it:

- `within` joins the ranks of this host, in shared memory where the platform has it;
- `across` joins the first rank of every host (its leader); it is None on the other ranks.

Collectives that know both levels (the hierarchical all-reduce, the torch backend) use `within` and `across` directly.
Everything else sees an ordinary transport and goes through `inner`.

While a leader waits for other hosts, the other ranks of its host wait for the leader in shared memory. They cannot
see whether data moves between hosts. So the leader's sockets report progress into `within` whenever a wait ends or
data arrives, which restarts the deadlines there. If another host is gone, the leader fails. The ranks that wait for
it see that it left, or that it aborted the channel, and fail in turn.
"""

from collections.abc import Sequence
from weakref import WeakSet

import torch
from torch import Tensor

from tutti.transports.base import Transport, TransportWrapper
from tutti.transports.capabilities import CanShare, ReportsProgress, SharesMemory
from tutti.transports.sockets.transport import SocketTransport


def shared_where_possible(transport: Transport) -> Transport:
    """Return `transport` with sums in shared memory if all its ranks are on one host, else unchanged. Collective."""
    one_host = len(set(transport.hosts)) == 1
    return transport.shared() if one_host and isinstance(transport, CanShare) else transport


def hosts_are_shared(transport: Transport) -> bool:
    """Whether there are two levels: several hosts, at least one of them with several ranks."""
    return 1 < len(set(transport.hosts)) < transport.size


def levelled(transport: Transport) -> Transport:
    """Return the fastest transport for the same ranks: two levels, shared memory, or `transport` itself. Collective."""
    return HostsTransport(transport) if hosts_are_shared(transport) else shared_where_possible(transport)


class HostsTransport(TransportWrapper):
    """Ranks on several hosts with several ranks each. Messages go through `inner`."""

    within: Transport
    """Joins the ranks of this host."""
    across: Transport | None
    """Joins the first rank of every host; None on other ranks."""

    def __init__(self, inner: Transport) -> None:
        """Open both levels. Collective."""
        self.inner = inner
        self.rank, self.size, self.hosts, self.timeout = inner.rank, inner.size, inner.hosts, inner.timeout
        self.cluster, self.seed = inner.cluster, inner.seed
        # Sorted, because a set has another order in each process, and the channel's ranks are numbered in this order.
        leaders = sorted(inner.hosts.index(host) for host in set(inner.hosts))
        local_ranks = [rank for rank, host in enumerate(inner.hosts) if host == inner.hosts[inner.rank]]
        self.within = shared_where_possible(inner.channel("within", local_ranks))
        self.across = inner.channel("across", leaders) if inner.rank in leaders else None
        # Weak: a channel that its user has dropped need not be closed from here.
        self._channels: WeakSet[Transport] = WeakSet()
        if isinstance(self.within, ReportsProgress) and isinstance(self.across, SocketTransport):
            # The other ranks of this host wait for whatever their leader waits for.
            self.across.on_progress(self.within.report_progress)

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        """Bytes sent over the network. Data that stays on this host is not counted."""
        return self.inner.bytes_sent + (self.across.bytes_sent if self.across is not None else 0)

    def channel(self, name: str, ranks: Sequence[int] | None = None) -> Transport:
        # A channel has both levels for itself, so that its sums never wait behind those of this transport.
        made = levelled(self.inner.channel(name, ranks))
        self._channels.add(made)
        return made

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate a flat CPU tensor that the ranks of this host can reach, where they can share memory."""
        if isinstance(self.within, SharesMemory):
            return self.within.empty(numel, dtype)
        return torch.empty(numel, dtype=dtype, device="cpu")

    def interrupt(self) -> None:
        # `across` is a channel of `inner`, and is interrupted and closed with it.
        for transport in (*self._channels, self.within, self.inner):
            transport.interrupt()

    def close(self) -> None:
        # All waits end before anything is closed: a thread of one channel may wait in another.
        self.interrupt()
        # `inner` before `within`: it joins the threads that may still use the shared memory of `within`.
        for transport in (*self._channels, self.inner, self.within):
            transport.close()
