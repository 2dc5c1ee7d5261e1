"""Transports: move tensors between ranks over TCP, shared memory, MPI, NCCL or Gloo.

`base` defines the interface, `capabilities` what some transports can do in addition. `hosts` joins two levels: shared
memory within each host, sockets between hosts.
"""

from tutti.transports.base import ANY, Transport, Work
from tutti.transports.capabilities import (
    AllReduces,
    Averages,
    Broadcasts,
    SharesAll,
    SharesMemory,
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
