"""Moving tensors between ranks."""

from tutti.transports.base import (
    ANY,
    AllReduces,
    Averages,
    Broadcasts,
    SharesAll,
    SharesMemory,
    Transport,
    Work,
    for_devices,
)
from tutti.transports.hosts import HostsTransport
from tutti.transports.membership import Membership, Peer
from tutti.transports.single_rank import SingleRankTransport
from tutti.transports.sockets.transport import SocketTransport

__all__ = [
    "ANY",
    "AllReduces",
    "Averages",
    "Broadcasts",
    "HostsTransport",
    "Membership",
    "Peer",
    "SharesAll",
    "SharesMemory",
    "SingleRankTransport",
    "SocketTransport",
    "Transport",
    "Work",
    "for_devices",
]
