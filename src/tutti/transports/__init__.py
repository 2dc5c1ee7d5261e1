"""Moving tensors between ranks."""

from tutti.transports.alone import AloneTransport
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
from tutti.transports.process_group import ProcessGroupTransport
from tutti.transports.roster import Peer, Roster

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
