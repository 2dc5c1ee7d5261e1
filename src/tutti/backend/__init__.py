"""Tutti as a backend of torch.distributed: `torch.distributed.init_process_group("tutti")`.

DDP, FSDP2, DTensor and pipelining run on it unchanged. Importing `tutti` is enough to have it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tutti.backend.collectives import Collectives
from tutti.backend.group import TuttiGroup
from tutti.backend.message_collectives import MessageCollectives
from tutti.backend.operation_queue import OperationQueue, RealTimeQueue
from tutti.backend.two_level_collectives import TwoLevelCollectives
from tutti.backend.virtual_time import VirtualTimeQueue
from tutti.transports import HostsTransport
from tutti.transports.base import Transport
from tutti.transports.capabilities import SharesAll, SharesMemory
from tutti.transports.hosts import hosts_are_shared

__all__ = ["GroupConnection", "TuttiGroup", "group_over"]


@dataclass(frozen=True)
class GroupConnection:
    """The connection between the ranks of a new group."""

    transport: Transport
    """Joins the ranks of the group."""
    world_rank: int
    """This rank's number in the whole world."""
    leave: Callable[[], None]
    """Announces to the others that this rank will answer no more."""


def group_over(connection: GroupConnection) -> TuttiGroup:
    """Make a group over a connection, which is closed with the group, or at once if making it fails. Collective."""
    transport = connection.transport
    try:
        if hosts_are_shared(transport) and not isinstance(transport, HostsTransport):
            transport = HostsTransport(transport)
        collectives, messages = _collectives_and_messages(transport)
    # Peers are in the same collective and would wait for this rank until their timeout: leaving tells them.
    except BaseException:
        connection.leave()
        transport.close()
        raise
    queue: OperationQueue = (
        RealTimeQueue(messages, connection.world_rank)
        if transport.cluster is None
        else VirtualTimeQueue(transport, messages)
    )

    def close() -> None:
        # The peers learn of it before the connection closes, so they do not wait for this rank until their timeout.
        connection.leave()
        # Both transports are interrupted first: the queue's threads may wait in either.
        messages.interrupt()
        transport.interrupt()
        queue.close()
        messages.close()
        transport.close()

    return TuttiGroup(collectives, queue, messages, connection.world_rank, close)


def _collectives_and_messages(transport: Transport) -> tuple[Collectives, Transport]:
    """Make the best collectives for a transport, and open a channel for messages beside them. Collective."""
    if isinstance(transport, HostsTransport):
        return TwoLevelCollectives(transport), transport.inner.channel("messages")
    if isinstance(transport, SharesMemory) and isinstance(transport, SharesAll):
        from tutti.backend.shared_memory_collectives import SharedMemoryCollectives  # It imports a compiler: slow.

        return SharedMemoryCollectives(transport), transport.inner.channel("messages")  # type: ignore[arg-type]
    return MessageCollectives(transport), transport.channel("messages")
