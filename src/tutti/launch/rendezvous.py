"""`init`: meet the other ranks and choose how to talk to them."""

import atexit
import fcntl
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from itertools import count
from typing import Any

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from tutti.cluster import Duration, parse_duration
from tutti.errors import ConfigError, DeadlineExceeded, EnvironmentConflict, RankLost
from tutti.launch import mpi
from tutti.launch.environment import LOOPBACK, RankEnvironment, read
from tutti.launch.supervisor_pipe import HOST, SupervisorPipe
from tutti.simulation import guard
from tutti.strategies import parse
from tutti.transports import Membership, Peer, SingleRankTransport, SocketTransport, Transport
from tutti.transports.base import DEFAULT_TIMEOUT
from tutti.transports.hosts import levelled
from tutti.transports.membership import wait_for_keys
from tutti.world import World, current_world, set_world

_world_numbers = count()
"""Worlds of one process, one after the other, meet under names of their own."""

_SIOCGIFADDR = 0x8915

_ELSEWHERE = "192.0.2.1"
"""An address of no host (RFC 5737), to ask by which way this one would send."""

KINDS = ("auto", "sockets", "shared_memory", "mpi")
"""Transports by name; "mpi:" takes an all-reduce algorithm of Open MPI's as well, as in "mpi:ring"."""


def init(*, timeout: Duration | None = None, transport: str | None = None) -> World:
    """Meet the other ranks of this run, as torchrun, mpirun, srun or `tutti run` describe it; alone otherwise.

    Called again, it returns the same world.

    Args:
        timeout: how long to wait for ranks to come, and for any answer later: seconds, a text such as "40s" or a
            timedelta; $TUTTI_TIMEOUT, or 5 minutes, by default.
        transport: "auto" takes shared memory when all ranks are on one host; "mpi" sends everything over MPI, and
            "mpi:ring", say, has Open MPI use its ring; $TUTTI_TRANSPORT by default.
    """
    if (world := current_world()) is not None:
        return world
    guard.refuse("tutti.init after the world was closed")
    limit = _timeout_from_environment() if timeout is None else parse_duration(timeout)
    kind = transport or os.environ.get("TUTTI_TRANSPORT", "auto")
    if mpi.is_mpi(kind):
        mpi.prepare(kind)  # Before `read`, which may start MPI.
    elif kind not in KINDS:
        raise ConfigError(f"transport '{kind}' is not one of {', '.join(KINDS)}.")
    place = read()
    if mpi.is_mpi(kind):
        mpi.check(place, kind)
    if place.size == 1:
        world = World(0, 1, place.local_rank, _host_name(), SingleRankTransport(limit))
    else:
        store = PrefixStore(f"tutti/{place.attempt}/{next(_world_numbers)}", _open_store(place, limit))
        membership = meet(place, store, limit)
        if mpi.is_mpi(kind):
            link: Transport = mpi.connect(membership)
        else:
            link = connect(membership, listen_address(place, membership), kind)
        me = membership.peers[membership.rank]
        who = (membership.rank, membership.size, place.local_rank, me.host)
        world = World(*who, link, leave=membership.leave, tolerate_loss=SupervisorPipe().tolerate_loss)
        _say_goodbye(world)
    if "TUTTI_STRATEGY" in os.environ:
        world = replace(world, strategy=parse(os.environ["TUTTI_STRATEGY"]))
    return set_world(world)


def connect(membership: Membership, address: str = LOOPBACK, kind: str = "auto") -> Transport:
    """A transport to everyone in `membership`. Collective."""
    transport = SocketTransport(membership, address=address)
    if kind == "shared_memory":
        from tutti.transports.shared_memory.transport import SharedMemoryTransport  # Costs a compiler's import.

        return SharedMemoryTransport(transport)
    if kind == "auto":
        return levelled(transport)
    return transport


def meet(place: RankEnvironment, store: Store, timeout: timedelta) -> Membership:
    """Wait until every rank has come, and learn who they are."""
    rank, size = place.rank, place.size
    keys = [f"peer/{other}" for other in range(size)]
    missing: list[int] = []
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        if store.add(f"came/{rank}", 1) > 1:
            raise EnvironmentConflict(f"two processes say they are rank {rank} of {size}; each needs its own.")
        store.set(keys[rank], Peer.this_process(rank, _host_name(), _host_id()).to_json())
        while not wait_for_keys(store, keys, min(1.0, timeout.total_seconds() / 4)):
            missing = [other for other in range(size) if not store.check([keys[other]])]
            if missing and time.monotonic() > deadline:
                raise _never_came(place, missing, timeout)
        return Membership(rank, [Peer.from_json(store.get(key)) for key in keys], store, timeout)
    except DistError as error:
        if missing:  # Whoever kept the store has given up waiting for them, a moment before this rank would have.
            raise _never_came(place, missing, timeout) from error
        raise RankLost(
            f"rank {rank}: the store at {place.address}:{place.port}, where ranks meet, is gone, and so is the process "
            "that kept it (the launcher, or rank 0). See its output."
        ) from error


def _never_came(place: RankEnvironment, missing: list[int], timeout: timedelta) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"rank {place.rank}: after {timeout.total_seconds():g} s {place.size - len(missing)} of {place.size} ranks are "
        f"here; missing: {', '.join(map(str, missing))}. Look whether they were started, and whether they reach "
        f"{place.address}:{place.port}; tutti.init(timeout=...) waits longer."
    )


def _say_goodbye(world: World) -> None:
    """Have the others told when this rank's script fails or ends, even if its process lives on for a while.

    A process does: mpi4py's own exit waits for the other ranks, and Python waits for the user's threads. And groups
    that are still open when Python itself ends make torch abort the process.
    """
    before = sys.excepthook

    def failed(*error: Any) -> None:
        world.leave()
        before(*error)

    sys.excepthook = failed
    atexit.register(world.close)


@cache  # A second world of this process meets in the same store.
def _open_store(place: RankEnvironment, timeout: timedelta) -> Store:
    assert place.address is not None
    assert place.port is not None
    serve = place.rank == 0 and not place.hosted
    listener = _listener(place.address, place.port) if serve else None
    try:
        return TCPStore(
            place.address,
            place.port,
            is_master=serve,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener,
        )
    except DistError as error:
        raise RankLost(
            f"rank {place.rank}: nobody answers at {place.address}:{place.port} ({str(error).splitlines()[0]}). "
            "Rank 0 was not started, MASTER_ADDR or MASTER_PORT is wrong, or a firewall is between."
        ) from error


def _listener(address: str, port: int) -> int:
    """A listening socket: on loopback only, where that is all the ranks need."""
    six = ":" in address
    local = {"localhost": LOOPBACK, LOOPBACK: LOOPBACK, "::1": "::1"}.get(address, "")
    listener = socket.socket(socket.AF_INET6 if six else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((local, port))
    except OSError as error:
        listener.close()
        raise EnvironmentConflict(
            f"rank 0: cannot listen on port {port} ({error.strerror}). Choose another MASTER_PORT."
        ) from error
    listener.listen(4096)
    return listener.detach()


def listen_address(place: RankEnvironment, membership: Membership) -> str:
    """Where this rank's own sockets listen: loopback on one host, else the address that faces rank 0."""
    if membership.one_host:
        return LOOPBACK
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        try:
            return _address_of(names.split(",")[0])
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(
                f"rank {membership.world_rank}: GLOO_SOCKET_IFNAME names '{names}', which has no address here "
                f"({error.strerror}). Known: {known}."
            ) from None
    assert place.address is not None
    # Towards rank 0; on rank 0's own host, towards anywhere else; or whatever this host has.
    tries = [lambda: _facing(place.address), lambda: _facing(_ELSEWHERE), *_interfaces()]
    for attempt in tries:
        with suppress(OSError):
            address = attempt()
            if not address.startswith("127.") and address != "::1":
                return address
    raise ConfigError(
        f"rank {membership.world_rank}: this host has no network address by which others could reach it; its "
        "ranks are on several hosts. Name its network interface in GLOO_SOCKET_IFNAME."
    )


def _facing(address: str | None) -> str:
    """This host's address on the way to another. Sends nothing: it only picks a route."""
    family, _, _, _, target = socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _interfaces() -> list[Callable[[], str]]:
    return [partial(_address_of, name) for _, name in socket.if_nameindex() if name != "lo"]


def _address_of(interface: str) -> str:
    """The IPv4 address of a network interface."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])


def _host_name() -> str:
    return os.environ.get(HOST) or socket.gethostname()


def _host_id() -> str:
    """The same for processes that can share memory and loopback: one kernel, one network namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            kernel = boot.read().strip()
        return "/".join([kernel, *(str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("net", "pid"))])
    except FileNotFoundError:
        return socket.gethostname()


def _timeout_from_environment() -> timedelta:
    text = os.environ.get("TUTTI_TIMEOUT")
    return DEFAULT_TIMEOUT if text is None else parse_duration(text, "TUTTI_TIMEOUT")
