"""`init`: rendezvous with the other ranks, and the choice of a transport to them.

How it works. Ranks find each other through one key-value store (torch's TCPStore). The launcher serves it, or rank 0 if
the launcher does not. Each world of a process uses keys under a prefix of its own, which holds the attempt of the job
and the number of the world, so that nothing an earlier one wrote is read.

1. Every rank adds 1 to `came/RANK`. Who gets more than 1 back knows that two processes have the same rank, and raises.
2. Every rank writes `peer/RANK`: its host, process number and the process's start time. Nobody else writes that key.
3. Every rank waits for all `peer/` keys. The wait ends when all are there, at the deadline (the error names the missing
   ranks), or when the store's process is gone (`RankLost`).
4. All have the same list now, and build the transport together: a collective step, in which each rank listens on the
   address that faces rank 0, and connects.

A rank that fails or ends says so in the store (`Membership.leave`), by an exception hook and an exit handler. The
others may still wait for it while its process lives on. A rank that is killed cannot; the others see that its process
is gone.
"""

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
from tutti.cluster.hosts import LOOPBACK
from tutti.errors import ConfigError, DeadlineExceeded, EnvironmentConflict, RankLost
from tutti.launch import mpi
from tutti.launch.default_group import make_default_group
from tutti.launch.environment import RankEnvironment, read_environment
from tutti.launch.supervisor_pipe import HOST, SupervisorPipe
from tutti.launch.undistributed import UndistributedCheck
from tutti.simulation import guard
from tutti.strategies import parse
from tutti.transports import Membership, Peer, SingleRankTransport, SocketTransport, Transport
from tutti.transports.base import DEFAULT_TIMEOUT
from tutti.transports.hosts import levelled
from tutti.transports.membership import wait_for_keys
from tutti.world import World, current_world, set_world

_world_numbers = count()
"""Numbers of the worlds that this process opens one after the other."""

# From linux/sockios.h: asks for the address of an interface.
_SIOCGIFADDR = 0x8915

_ELSEWHERE = "192.0.2.1"
"""An address that no host has (RFC 5737): the route to it shows which interface faces other hosts."""

TRANSPORTS = ("auto", "sockets", "shared_memory", "mpi")
"""Names of transports; "mpi:ring" also selects the all-reduce algorithm of Open MPI."""


def init(*, timeout: Duration | None = None, transport: str | None = None, torch_distributed: bool = False) -> World:
    """Join the world of this run, as torchrun, mpirun, srun or `tutti run` describe it; a world of one otherwise.

    Collective: waits until every rank has called it. Called again, it returns the same world.

    Args:
        timeout: how long to wait for ranks to come, and for any answer later: seconds, a text such as "40s" or a
            timedelta; $TUTTI_TIMEOUT, or 5 minutes, by default.
        transport: "auto" takes shared memory when all ranks are on one host; "mpi" sends everything over MPI, and
            "mpi:ring", say, has Open MPI use its ring; $TUTTI_TRANSPORT by default.
        torch_distributed: also make torch's default process group, of backend "tutti", so that code which calls
            `torch.distributed` works; unless there is one already. It is destroyed with the world. Collective.
    """
    # A script may call it in several places, as may a library beside it.
    if (world := current_world()) is None:
        world = _join(timeout, transport)
    if torch_distributed:
        make_default_group(world)
    return world


def _join(timeout: Duration | None, transport: str | None) -> World:
    """Meet the other ranks, and make the world of this thread."""
    guard.refuse("tutti.init after the world was closed")
    limit = _timeout_from_environment() if timeout is None else parse_duration(timeout)
    kind = transport or os.environ.get("TUTTI_TRANSPORT", "auto")
    if mpi.is_mpi(kind):
        mpi.prepare(kind)  # Before `read_environment`, which may start MPI.
    elif kind not in TRANSPORTS:
        raise ConfigError(f"transport '{kind}' is not one of {', '.join(TRANSPORTS)}.")
    # 1. Who this process is, by the variables of its launcher.
    environment = read_environment()
    if mpi.is_mpi(kind):
        mpi.check(environment, kind)
    if environment.size == 1:
        world = World(0, 1, environment.local_rank, _host_name(), SingleRankTransport(limit))
    else:
        # All ranks open worlds in the same order, so the n-th world has the same keys on all of them.
        store = PrefixStore(f"tutti/{environment.attempt}/{next(_world_numbers)}", _open_store(environment, limit))
        # 2. Who the others are.
        membership = wait_for_ranks(environment, store, limit)
        if mpi.is_mpi(kind):
            joined: Transport = mpi.connect(membership)
        else:
            joined = connect(membership, listen_address(environment, membership), kind)
        me = membership.peers[membership.rank]
        numbers = (membership.rank, membership.size, environment.local_rank, me.host)
        world = World(*numbers, joined, leave=membership.leave, tolerate_loss=SupervisorPipe().tolerate_loss)
        _leave_at_exit(world)
    # `tutti run --strategy` overrules what the script asks for, without a change to the script.
    if "TUTTI_STRATEGY" in os.environ:
        world = replace(world, strategy=parse(os.environ["TUTTI_STRATEGY"]))
    return set_world(world)


def connect(membership: Membership, address: str = LOOPBACK, kind: str = "auto") -> Transport:
    """Open a transport to all ranks in `membership`. Collective.

    Args:
        address: where this rank's sockets listen.
        kind: one of `TRANSPORTS` other than "mpi".
    """
    transport = SocketTransport(membership, address=address)
    if kind == "shared_memory":
        from tutti.transports.shared_memory.transport import SharedMemoryTransport  # Costs a compiler's import.

        return SharedMemoryTransport(transport)
    if kind == "auto":
        return levelled(transport)
    return transport


def wait_for_ranks(environment: RankEnvironment, store: Store, timeout: timedelta) -> Membership:
    """Wait until every rank has registered in the store, and return who they are.

    Raises `DeadlineExceeded` with the missing ranks after `timeout`, `EnvironmentConflict` if two processes have the
    same rank, `RankLost` if the process that serves the store is gone.
    """
    rank, size = environment.rank, environment.size
    keys = [f"peer/{other}" for other in range(size)]
    missing: list[int] = []
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        # Adding is atomic in the store: of two processes with one rank, the second sees 2. Overwriting `peer/` would
        # not show it.
        if store.add(f"came/{rank}", 1) > 1:
            raise EnvironmentConflict(f"two processes say they are rank {rank} of {size}; each needs its own.")
        store.set(keys[rank], Peer.this_process(rank, _host_name(), _host_id()).to_json())
        # In short waits, so that `missing` is known when the store goes away in the middle of one.
        while not wait_for_keys(store, keys, min(1.0, timeout.total_seconds() / 4)):
            missing = [other for other in range(size) if not store.check([keys[other]])]
            if missing and time.monotonic() > deadline:
                raise _missing_ranks(environment, missing, timeout)
        return Membership(rank, [Peer.from_json(store.get(key)) for key in keys], store, timeout)
    except DistError as error:
        if missing:  # The rank that served the store gave up on them, a moment before this rank would have.
            raise _missing_ranks(environment, missing, timeout) from error
        raise RankLost(
            f"rank {rank}: the store at {environment.store}, where ranks meet, is gone, and so is the process "
            "that kept it (the launcher, or rank 0). See its output."
        ) from error


def _missing_ranks(environment: RankEnvironment, missing: list[int], timeout: timedelta) -> DeadlineExceeded:
    """Return the error that names the ranks that have not come."""
    size = environment.size
    return DeadlineExceeded(
        f"rank {environment.rank}: after {timeout.total_seconds():g} s {size - len(missing)} of {size} ranks are "
        f"here; missing: {', '.join(map(str, missing))}. Look whether they were started, and whether they reach "
        f"{environment.store}; tutti.init(timeout=...) waits longer."
    )


def _leave_at_exit(world: World) -> None:
    """Tell the others when this rank's script fails or ends, even if its process lives on for a while.

    It may live on because mpi4py's exit waits for the other ranks, or Python for the user's threads. The world is
    closed too: groups that are open when Python ends make torch abort the process.
    """
    # The hook runs before exit handlers, and before Python waits for threads: others learn of a failure at once.
    before = sys.excepthook
    checks = [UndistributedCheck(world)]

    def failed(*error: Any) -> None:
        checks.clear()  # The script has an error to report already.
        world.leave()
        before(*error)

    def ended() -> None:
        try:
            for check in checks:
                check.finished()
        except ConfigError as error:
            print(f"ConfigError: {error}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            world.close()
            os._exit(1)  # A handler cannot set the status in another way.
        world.close()

    sys.excepthook = failed
    atexit.register(ended)


@cache  # A second world of this process uses the same connection.
def _open_store(environment: RankEnvironment, timeout: timedelta) -> Store:
    """Connect to the store through which ranks meet; rank 0 serves it too, where the launcher does not."""
    assert environment.address is not None
    assert environment.port is not None
    # A launcher's store outlives every rank; that of rank 0 ends with it.
    serve = environment.rank == 0 and not environment.hosted
    listener = _listener(environment.address, environment.port) if serve else None
    try:
        return TCPStore(
            environment.address,
            environment.port,
            is_master=serve,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener,
        )
    except DistError as error:
        raise RankLost(
            f"rank {environment.rank}: nobody answers at {environment.store} ({str(error).partition(chr(10))[0]}). "
            "Rank 0 was not started, MASTER_ADDR or MASTER_PORT is wrong, or a firewall is between."
        ) from error


def _listener(address: str, port: int) -> int:
    """Open the store's listening socket: on loopback only, where `address` is this host alone."""
    six = ":" in address
    local = {"localhost": LOOPBACK, LOOPBACK: LOOPBACK, "::1": "::1"}.get(address, "")
    listener = socket.socket(socket.AF_INET6 if six else socket.AF_INET)
    # A restarted job binds the same port while connections of the old one are still in TIME_WAIT.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((local, port))
    except OSError as error:
        listener.close()
        raise EnvironmentConflict(
            f"rank 0: cannot listen on port {port} ({error.strerror}). Choose another MASTER_PORT."
        ) from error
    # All ranks of a large world connect at about the same time. The kernel may allow fewer (net.core.somaxconn).
    listener.listen(4096)
    return listener.detach()


def listen_address(environment: RankEnvironment, membership: Membership) -> str:
    """Choose where this rank's sockets listen: loopback on one host, else the address that faces rank 0."""
    # Nothing listens on the network where no other host has to connect.
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
    assert environment.address is not None
    # First the address towards rank 0. On rank 0's own host that is loopback, so towards any other host. Then whatever
    # address an interface has.
    candidates = [lambda: _address_towards(environment.address), lambda: _address_towards(_ELSEWHERE), *_interfaces()]
    for candidate in candidates:
        with suppress(OSError):
            address = candidate()
            if not address.startswith("127.") and address != "::1":
                return address
    raise ConfigError(
        f"rank {membership.world_rank}: this host has no network address by which others could reach it; its "
        "ranks are on several hosts. Name its network interface in GLOO_SOCKET_IFNAME."
    )


def _address_towards(address: str | None) -> str:
    """This host's address on the route to another. Nothing is sent: connecting a datagram socket only picks a route."""
    family, _, _, _, target = socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _interfaces() -> list[Callable[[], str]]:
    """Functions that return the address of each network interface but loopback; one without an address raises."""
    return [partial(_address_of, name) for _, name in socket.if_nameindex() if name != "lo"]


def _address_of(interface: str) -> str:
    """The IPv4 address of a network interface."""
    # struct ifreq of netdevice(7): the name, at most 15 bytes, and from byte 20 on the IPv4 address of the answer.
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])


def _host_name() -> str:
    """The name of this host for people: that of the lab's host, where the launcher gave it one."""
    return os.environ.get(HOST) or socket.gethostname()


def _host_id() -> str:
    """An identifier that is equal for processes that share memory and loopback: one kernel, one network namespace."""
    try:
        # Containers of one machine share the kernel but not the network or the process numbers: all three have to
        # match.
        with open("/proc/sys/kernel/random/boot_id") as boot:
            kernel = boot.read().strip()
        return "/".join([kernel, *(str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("net", "pid"))])
    except FileNotFoundError:
        return socket.gethostname()


def _timeout_from_environment() -> timedelta:
    text = os.environ.get("TUTTI_TIMEOUT")
    return DEFAULT_TIMEOUT if text is None else parse_duration(text, "TUTTI_TIMEOUT")
