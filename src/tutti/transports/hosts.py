"""Several hosts with several ranks each: one transport that knows both levels."""

from collections.abc import Sequence
from weakref import WeakSet

import torch
from torch import Tensor

from tutti.transports.base import CanShare, ReportsProgress, SharesMemory, Transport, TransportWrapper
from tutti.transports.sockets.transport import SocketTransport


def shared_where_possible(transport: Transport) -> Transport:
    """The same conversation with sums in shared memory, if all its ranks are on one host."""
    one_host = len(set(transport.hosts)) == 1
    return transport.shared() if one_host and isinstance(transport, CanShare) else transport


def hosts_are_shared(transport: Transport) -> bool:
    """Whether there are two levels: more hosts than one, and fewer than ranks."""
    return 1 < len(set(transport.hosts)) < transport.size


def levelled(transport: Transport) -> Transport:
    """The same conversation by the best means there are: two levels, one in shared memory, or as it is. Collective."""
    return HostsTransport(transport) if hosts_are_shared(transport) else shared_where_possible(transport)


class HostsTransport(TransportWrapper):
    """Messages go through `inner`; `within` joins the ranks of this host, `across` the first rank of every host."""

    def __init__(self, inner: Transport) -> None:
        """Open both levels. Collective."""
        self.inner = inner
        self.rank, self.size, self.hosts, self.timeout = inner.rank, inner.size, inner.hosts, inner.timeout
        self.cluster, self.seed = inner.cluster, inner.seed
        leaders = sorted(inner.hosts.index(host) for host in set(inner.hosts))
        here = [rank for rank, host in enumerate(inner.hosts) if host == inner.hosts[inner.rank]]
        self.within = shared_where_possible(inner.channel("within", here))
        self.across = inner.channel("across", leaders) if inner.rank in leaders else None
        self._channels: WeakSet[Transport] = WeakSet()
        if isinstance(self.within, ReportsProgress) and isinstance(self.across, SocketTransport):
            self.across.on_progress(
                self.within.report_progress
            )  # This host's others wait for what their leader waits for.

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        """Over the network: what stays on this host is not counted."""
        return self.inner.bytes_sent + (self.across.bytes_sent if self.across is not None else 0)

    def channel(self, name: str, ranks: Sequence[int] | None = None) -> Transport:
        made = levelled(self.inner.channel(name, ranks))
        self._channels.add(made)
        return made

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat CPU tensor that the ranks of this host can reach, where they can share memory."""
        if isinstance(self.within, SharesMemory):
            return self.within.empty(numel, dtype)
        return torch.empty(numel, dtype=dtype, device="cpu")

    def interrupt(self) -> None:
        for each in (*self._channels, self.within, self.inner):
            each.interrupt()

    def close(self) -> None:
        self.interrupt()
        for each in (*self._channels, self.inner, self.within):
            each.close()
