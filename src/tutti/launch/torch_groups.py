"""Groups of torch.distributed: how their ranks meet."""

import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from tutti.backend import GroupConnection
from tutti.launch.environment import RankEnvironment
from tutti.launch.rendezvous import listen_address, meet
from tutti.simulation import operator_clock
from tutti.transports import Membership, SingleRankTransport, SocketTransport, Transport
from tutti.transports.base import TransportWrapper
from tutti.transports.hosts import shared_where_possible
from tutti.world import current_world

_generations: Counter[str] = Counter()
"""How often a group of each name was made here: a store may remember the ones before."""


def open_group(options: Any) -> GroupConnection:
    """Meet the other ranks of a group through its store, and choose how to talk to them."""
    rank, size = options.group_rank, options.group_size
    numbers = list(options.global_ranks_in_group) or list(range(size))
    world = current_world()
    along = None if world is None else _taken_along(world.transport)
    with ExitStack() as stack:
        if along is not None and along.cluster is not None:
            stack.enter_context(operator_clock.counting(along))
        if size == 1:
            transport: Transport = SingleRankTransport(options.timeout)
        elif along is not None:
            transport = along.channel(f"torch {options.group_id}", numbers)
        else:
            membership, address = _meet(options, numbers)
            stack.callback(membership.leave)
            transport = _connect(membership, address)
        return GroupConnection(transport, numbers[rank], stack.pop_all().close)


def _meet(options: Any, numbers: list[int]) -> tuple[Membership, str]:
    """Who the others are, and where to listen for them."""
    _generations[options.group_id] += 1
    store = PrefixStore(f"tutti/{_generations[options.group_id]}", options.store)
    place = RankEnvironment("torch.distributed", options.group_rank, options.group_size, 0, *_address(options.store))
    membership = _in_the_world(meet(place, store, options.timeout), numbers)
    return membership, listen_address(place, membership)


def _connect(membership: Membership, address: str) -> Transport:
    transport = SocketTransport(membership, address=address)
    try:
        return shared_where_possible(transport)
    except BaseException:
        transport.close()
        raise


def _taken_along(transport: Transport) -> Transport | None:
    """The transport of the world there is, if groups are to use that: ranks that are simulated, or on MPI."""
    while isinstance(transport, TransportWrapper):
        transport = transport.inner
    if transport.cluster is not None:
        return transport
    mpi = sys.modules.get("tutti.transports.mpi.transport")
    return transport if mpi is not None and isinstance(transport, mpi.MpiTransport) else None


def _in_the_world(membership: Membership, numbers: list[int]) -> Membership:
    """The same ranks, named as in the whole world."""
    peers = [replace(peer, rank=number) for peer, number in zip(membership.peers, numbers, strict=True)]
    made = Membership(membership.rank, peers, membership.store, membership.timeout)
    made.timeout_hint = "the timeout of init_process_group or new_group"
    return made


def _address(store: Store) -> tuple[str | None, int | None]:
    """Where the store is, if it is on the network."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, TCPStore) else (None, None)
