"""Process groups of torch.distributed on the "tutti" backend: rendezvous of their ranks, and choice of a transport.

Groups in a world that is simulated, or runs over MPI, use a channel of that world's transport. All others meet at the
run's coordinator, which they find through the store that torch gives them, and open sockets and shared memory of their
own.
"""

import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from tutti.backend import GroupConnection
from tutti.launch.control_plane import member_through, wait_for_ranks
from tutti.launch.environment import RankEnvironment
from tutti.launch.host import listen_address
from tutti.simulation import operator_clock
from tutti.transports import Membership, SingleRankTransport, SocketTransport, Transport
from tutti.transports.base import TransportWrapper
from tutti.transports.hosts import shared_where_possible
from tutti.world import current_world


def open_group(options: Any) -> GroupConnection:
    """Join the ranks of a group and return their transport. Collective.

    Args:
        options: torch's description of the group (`DistributedBackendOptions`).
    """
    rank, size = options.group_rank, options.group_size
    # Empty for the default group, which has all ranks in their order.
    numbers = list(options.global_ranks_in_group) or list(range(size))
    world = current_world()
    shared = None if world is None else _transport_for_groups(world.transport)
    with ExitStack() as stack:
        # In a simulation the group also counts torch's operators, from which virtual computing time follows.
        if shared is not None and shared.cluster is not None:
            stack.enter_context(operator_clock.counting(shared))
        if size == 1:
            transport: Transport = SingleRankTransport(options.timeout)
        elif shared is not None:
            transport = shared.channel(f"torch {options.group_id}", numbers)
        else:
            membership = _rendezvous(options, numbers)
            # Before the connection: if it fails here, the ranks that wait for this one learn that it left.
            stack.callback(membership.leave)
            transport = _connect(membership)
        return GroupConnection(transport, numbers[rank], stack.pop_all().close)


def _rendezvous(options: Any, numbers: list[int]) -> Membership:
    """Wait for the ranks of the group."""
    rank, size = options.group_rank, options.group_size
    # The store may still hold keys of an earlier group of the same name. It counts them, and not this process, which
    # need not have been in all of them.
    number = options.store.add(f"tutti/opened by {rank}", 1)
    address, port = _address(options.store)
    key = f"tutti/{number}"
    member, scope = member_through(options.store, key, numbers[rank], rank == 0, options.timeout)
    membership = _with_global_ranks(wait_for_ranks(member, scope, rank, size, options.timeout), numbers)
    environment = RankEnvironment("torch.distributed", rank, size, 0, address, port)
    membership.address = listen_address(environment, membership)
    return membership


def _connect(membership: Membership) -> Transport:
    """Open a transport of the group's own. Where that fails half way, nothing of it stays open."""
    transport = SocketTransport(membership)
    try:
        return shared_where_possible(transport)
    except BaseException:
        transport.close()
        raise


def _transport_for_groups(transport: Transport) -> Transport | None:
    """The world's transport, if groups must use it: in a simulation, and over MPI. None otherwise."""
    while isinstance(transport, TransportWrapper):
        transport = transport.inner
    if transport.cluster is not None:
        return transport
    # Looked up and not imported: importing it would start MPI in processes that have nothing to do with it.
    mpi = sys.modules.get("tutti.transports.mpi.transport")
    return transport if mpi is not None and isinstance(transport, mpi.MpiTransport) else None


def _with_global_ranks(membership: Membership, numbers: list[int]) -> Membership:
    """The same members, with their ranks in the whole world, which error messages show."""
    peers = [replace(peer, rank=number) for peer, number in zip(membership.peers, numbers, strict=True)]
    renumbered = Membership(membership.rank, peers, membership.member, membership.scope, membership.timeout)
    renumbered.timeout_hint = "the timeout of init_process_group or new_group"
    return renumbered


def _address(store: Store) -> tuple[str | None, int | None]:
    """Address and port of the store, if it is on the network."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, TCPStore) else (None, None)
