"""Tutti as a backend of torch.distributed: `torch.distributed.init_process_group("tutti")`.

DDP, FSDP2, DTensor and pipelining run on it unchanged. Importing `tutti` is enough to have it.
"""

import atexit
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch.distributed as dist

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

__all__ = ["GroupConnection", "TuttiGroup", "group_over", "register"]

NAME = "tutti"
"""The name of the backend in torch.distributed."""


@dataclass(frozen=True)
class GroupConnection:
    """The connection between the ranks of a new group."""

    transport: Transport
    """Joins the ranks of the group."""
    world_rank: int
    """This rank's number in the whole world."""
    leave: Callable[[], None]
    """Announces to the others that this rank will answer no more."""


def register(open_group: Callable[[Any], GroupConnection]) -> None:
    """Register the backend with torch.distributed.

    `open_group` is called on every rank of a new group with torch's options for it, and connects the ranks.
    """

    groups: WeakSet[TuttiGroup] = WeakSet()

    def create(options: Any, _: Any) -> TuttiGroup:
        group = group_over(open_group(options))
        groups.add(group)
        return group

    def close() -> None:
        """Close all groups before Python ends: threads that are still inside torch then would abort the process."""
        for group in list(groups):
            group.shutdown()

    atexit.register(close)
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])


def group_over(connection: GroupConnection) -> TuttiGroup:
    """Make a group over a connection, which is closed with the group, or at once if making it fails. Collective."""
    transport = connection.transport
    try:
        if hosts_are_shared(transport) and not isinstance(transport, HostsTransport):
            transport = HostsTransport(transport)
        collectives, messages = _collectives_and_messages(transport)
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
