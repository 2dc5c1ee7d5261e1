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


@dataclass(frozen=True)
class GroupConnection:
    """What a group is made of: how its ranks were joined."""

    transport: Transport
    me: int
    """This rank's number in the whole world."""
    leave: Callable[[], None]
    """Tells the others that this rank will answer no more."""


def register(open_group: Callable[[Any], GroupConnection]) -> None:
    """Let torch.distributed make groups of Tutti's. `open_group` is given torch's options of a group, on every rank."""

    groups: WeakSet[TuttiGroup] = WeakSet()

    def create(options: Any, _: Any) -> TuttiGroup:
        group = group_over(open_group(options))
        groups.add(group)
        return group

    def close() -> None:
        """Before Python ends: threads that are still in torch then would make it abort the process."""
        for group in list(groups):
            group.shutdown()

    atexit.register(close)
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])


def group_over(opened: GroupConnection) -> TuttiGroup:
    """A group of the ranks that a transport joins, which is closed with it, or at once if that fails. Collective."""
    transport = opened.transport
    try:
        if hosts_are_shared(transport) and not isinstance(transport, HostsTransport):
            transport = HostsTransport(transport)
        collectives, messages = _conversations(transport)
    except BaseException:
        opened.leave()
        transport.close()
        raise
    lane: OperationQueue = (
        RealTimeQueue(messages, opened.me) if transport.cluster is None else VirtualTimeQueue(transport, messages)
    )

    def close() -> None:
        opened.leave()
        messages.interrupt()
        transport.interrupt()
        lane.close()
        messages.close()
        transport.close()

    return TuttiGroup(collectives, lane, messages, opened.me, close)


def _conversations(transport: Transport) -> tuple[Collectives, Transport]:
    """What does collectives, and what carries messages beside them. Collective."""
    if isinstance(transport, HostsTransport):
        return TwoLevelCollectives(transport), transport.inner.channel("messages")
    if isinstance(transport, SharesMemory) and isinstance(transport, SharesAll):
        from tutti.backend.shared_memory_collectives import SharedMemoryCollectives  # Costs a compiler's import.

        return SharedMemoryCollectives(transport), transport.inner.channel("messages")  # type: ignore[arg-type]
    return MessageCollectives(transport), transport.channel("messages")
