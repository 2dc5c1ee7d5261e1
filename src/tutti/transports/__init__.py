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
    suited,
)
from tutti.transports.hosts import HostsTransport
from tutti.transports.membership import Peer, Roster
from tutti.transports.single_rank import AloneTransport
from tutti.transports.sockets.transport import ProcessGroupTransport

__all__ = [
    "ANY",
    "AllReduces",
    "AloneTransport",
    "Averages",
    "Broadcasts",
    "HostsTransport",
    "Peer",
    "ProcessGroupTransport",
    "Roster",
    "SharesAll",
    "SharesMemory",
    "Transport",
    "Work",
    "suited",
]
