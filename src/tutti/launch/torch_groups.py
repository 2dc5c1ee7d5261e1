"""Groups of torch.distributed: how their ranks meet."""

from collections import Counter
from dataclasses import replace
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from tutti.backend import Opened, meter
from tutti.launch.environment import Place
from tutti.launch.rendezvous import listen_address, meet
from tutti.transports import AloneTransport, ProcessGroupTransport, Roster, Transport
from tutti.transports.base import Added
from tutti.transports.hosts import shared_where_possible
from tutti.world import World, current_world

_generations: Counter[str] = Counter()
"""How often a group of each name was made here: a store may remember the ones before."""


def open_group(options: Any) -> Opened:
    """Meet the other ranks of a group through its store, and choose how to talk to them."""
    rank, size = options.group_rank, options.group_size
    me = (list(options.global_ranks_in_group) or list(range(size)))[rank]
    if (world := current_world()) is not None and world.transport.cluster is not None:
        return _simulated(world, options, me)
    if size == 1:
        return Opened(AloneTransport(options.timeout), me, lambda: None)
    _generations[options.group_id] += 1
    store = PrefixStore(f"tutti/{_generations[options.group_id]}", options.store)
    place = Place("torch.distributed", rank, size, 0, *_address(options.store))
    roster = _in_the_world(meet(place, store, options.timeout), list(options.global_ranks_in_group))
    transport: Transport = ProcessGroupTransport(roster, address=listen_address(place, roster))
    return Opened(shared_where_possible(transport), me, roster.leave)


def _simulated(world: World, options: Any, me: int) -> Opened:
    """A group of simulated ranks, which know each other already; time passes as their operators run."""
    transport = world.transport
    while isinstance(transport, Added):
        transport = transport.inner
    meter.start(transport)
    numbers = list(options.global_ranks_in_group) or None
    made = transport.channel(f"torch {options.group_id}", numbers)
    return Opened(made, me, lambda: None)


def _in_the_world(roster: Roster, numbers: list[int]) -> Roster:
    """The same ranks, named as in the whole world."""
    if not numbers:
        return roster
    peers = [replace(peer, rank=number) for peer, number in zip(roster.peers, numbers, strict=True)]
    return Roster(roster.rank, peers, roster.store, roster.timeout)


def _address(store: Store) -> tuple[str | None, int | None]:
    """Where the store is, if it is on the network."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, TCPStore) else (None, None)
