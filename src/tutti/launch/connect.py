"""`connect`: the transport between the ranks of a membership, by its name."""

from tutti.transports import Membership, SocketTransport, Transport
from tutti.transports.hosts import levelled


def connect(membership: Membership, kind: str = "auto") -> Transport:
    """Open a transport to all ranks in `membership`. Collective.

    Args:
        kind: "auto", "sockets" or "shared_memory".
    """
    transport = SocketTransport(membership)
    if kind == "shared_memory":
        from tutti.transports.shared_memory.transport import SharedMemoryTransport  # Costs a compiler's import.

        return SharedMemoryTransport(transport)
    if kind == "auto":
        return levelled(transport)
    return transport
