"""The coordinator of a run: where it is, or, on rank 0, starting it; and this process as a member of the run.

- Under `tutti run` and `tutti.launch` the launcher serves it. TUTTI_COORDINATOR says where.
- Under torchrun, whose agent has a store at MASTER_PORT, rank 0 serves it at a port of its own, and tells the others
  through that store.
- Otherwise (mpirun, srun, ranks started by hand) rank 0 serves it at MASTER_PORT.
"""

import atexit
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from torch.distributed import PrefixStore, Store, TCPStore

from tutti.cluster.hosts import LOOPBACK
from tutti.coordination import Coordinator, Member, MemberDescription
from tutti.coordination.handshake import is_loopback
from tutti.coordination.link import ConnectedMember, Endpoint, connect_member
from tutti.errors import ConfigError, DeadlineExceeded, EnvironmentConflict, RankLost
from tutti.launch.control_settings import COORDINATOR, SECRET, find_patience, find_secret
from tutti.launch.diagnosis_line import DiagnosisThread
from tutti.launch.environment import RankEnvironment
from tutti.launch.host import address_towards, host_id, host_name, network_address
from tutti.launch.host_observer import HostObserver
from tutti.transports import Membership, Peer

_log = logging.getLogger("tutti")


def member_of_run(environment: RankEnvironment, timeout: timedelta) -> Member:
    """This process as a member of the run that its launcher describes. Rank 0 serves the coordinator if need be."""
    return _member(_endpoint(environment, timeout), environment.rank, timeout)


def member_through(store: Store, key: str, rank: int, is_first: bool, timeout: timedelta) -> tuple[Member, str]:
    """This process as a member of the job of a torch.distributed group, and the name of a scope for the group.

    The group's first rank chooses both, and tells the others through the store that they share.

    Args:
        key: of this group alone in the store.
        rank: of this process, for messages.
        is_first: whether this process is the group's first rank.
    """

    def choose() -> str:
        known = next((endpoint for endpoint, _ in _members), None)
        if COORDINATOR in os.environ:
            known = _from_environment()
        return f"{known.address} {known.port}" if known else _publish(_address_of(store) or LOOPBACK)

    def publish() -> str:
        return f"{choose()} torch/{secrets.token_hex(8)}"

    text = _exchange(lambda: store, publish if is_first else None, key, rank, timeout)
    address, port, scope = text.split()
    # A launcher that gave this process a number knows it by that one, whatever its number in the group.
    number = int(os.environ.get("RANK", rank))
    return _member(Endpoint(address, int(port)), number, timeout), scope


def _address_of(store: Store) -> str | None:
    """The address of a store; None if it is not on the network."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else None


def wait_for_ranks(member: Member, scope: str, rank: int, size: int, timeout: timedelta) -> Membership:
    """Wait until every rank of a scope has come, and return who they are.

    Raises `DeadlineExceeded` with the missing ranks after `timeout`, `EnvironmentConflict` if two processes have the
    same rank.
    """

    def waiting(missing: list[int], seconds: float) -> None:
        # The first rank that is present prints it for all.
        if rank == min(set(range(size)) - set(missing), default=rank):
            names = ", ".join(map(str, missing))
            print(f"tutti: waiting for rank {names} of {size} for {seconds:.0f} s", file=sys.stderr, flush=True)

    found = member.join(scope, rank, size, timeout.total_seconds(), waiting)
    if found is None:
        missing = member.known.missing.get(scope, ([], 0.0))[0]
        raise DeadlineExceeded(
            f"rank {rank}: after {timeout.total_seconds():g} s {size - len(missing)} of {size} ranks are here; "
            f"missing: {', '.join(map(str, missing))}. Look whether they were started, and whether they reach "
            f"{member.place}; tutti.init(timeout=...) waits longer."
        )
    have_host_observed(member, found)
    return Membership(rank, [Peer(number, each) for number, each in enumerate(found)], member, scope, timeout)


_observers: dict[Member, HostObserver] = {}
"""What this process has started, as each member."""


def have_host_observed(member: Member, roster: list[MemberDescription]) -> None:
    """Start an observer of this host, if the coordinator is on another and this process is the first rank here."""
    here = member.description.host_id
    first = next(each for each in roster if each.host_id == here)
    if first == member.description and here != member.known.coordinator_host and member not in _observers:
        assert isinstance(member, ConnectedMember)
        try:
            _observers[member] = HostObserver(member.endpoint)
        except OSError as error:  # Too many processes, for example. The job does not need it.
            _log.warning(
                "no process could be started that sees whether the ranks of %s run (%s): one that holds the "
                "interpreter's lock for longer than the patience may be taken for lost.",
                member.description.host,
                error.strerror,
            )
            return
        atexit.register(_observers[member].close)


_members: dict[tuple[Endpoint, int], Member] = {}
"""This process as a member of its jobs: a second world or group uses the same connection. By rank, too, since ranks may
be threads of one process."""

_connecting = threading.Lock()


def _member(endpoint: Endpoint, rank: int, timeout: timedelta) -> Member:
    with _connecting:  # For as long as `timeout`, after which `connect_member` fails.
        key = endpoint, rank
        if key not in _members:
            _members[key] = _connect(endpoint, rank, timeout)
        return _members[key]


def _connect(endpoint: Endpoint, rank: int, timeout: timedelta) -> Member:
    secret = find_secret()
    if secret.is_open and rank == 0:
        print(
            f"tutti: {SECRET}=none: this run is open to everybody who reaches its ports, and nothing is encrypted.",
            file=sys.stderr,
            flush=True,
        )
    description = MemberDescription.this_process(rank, host_name(), host_id())
    member = connect_member(description, endpoint, secret, timeout=timeout, patience=find_patience())
    # Without a launcher that serves it, it is in the process of rank 0.
    member.is_served_by_rank = COORDINATOR not in os.environ
    atexit.register(member.close)
    return member


_endpoints: dict[RankEnvironment, Endpoint] = {}
"""Where the coordinator of each run is, as this process found out. Rank 0 listens once, whatever its timeouts are."""


def _endpoint(environment: RankEnvironment, timeout: timedelta) -> Endpoint:
    """Where the coordinator of this run is, which rank 0 starts where the launcher has not."""
    if COORDINATOR in os.environ:
        return _from_environment()
    if environment not in _endpoints:
        _endpoints[environment] = _find_endpoint(environment, timeout)
    return _endpoints[environment]


def _find_endpoint(environment: RankEnvironment, timeout: timedelta) -> Endpoint:
    assert environment.address is not None
    assert environment.port is not None
    address, port = environment.address, environment.port
    if not environment.hosted:
        if environment.rank == 0:
            _serve(listener(address, port), address)
        return Endpoint(address, port)

    def torch_store() -> Store:
        return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)

    publish = partial(_publish, address) if environment.rank == 0 else None
    text = _exchange(torch_store, publish, f"tutti coordinator/{environment.attempt}", environment.rank, timeout)
    address, port_text = text.split()
    return Endpoint(address, int(port_text))


def _from_environment() -> Endpoint:
    address, _, port = os.environ[COORDINATOR].rpartition(":")
    if not (address and port.isdecimal()):
        raise EnvironmentConflict(f"{COORDINATOR} must be ADDRESS:PORT, got '{os.environ[COORDINATOR]}'.")
    return Endpoint(address, int(port))


def _publish(address: str) -> str:
    """Serve a coordinator where the others reach it, if this process serves none; return where."""
    here = LOOPBACK if is_loopback(address) else _own_address(address)
    served = _served[0] if _served else _serve(listener(here, 0), here)
    return f"{served.address} {served.port}"


def _own_address(address: str) -> str:
    """An address of this host by which others reach it, who also reach `address`."""
    found = address_towards(address)
    # On the host whose address it is, the way to it is loopback.
    own = socket.gethostbyname(address) if is_loopback(found) else found
    # Some systems give their own name an address of loopback, which other hosts do not reach.
    if is_loopback(own) and os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE", ""):
        return network_address(address) or own
    return own


def _exchange(
    store: Callable[[], Store], publish: Callable[[], str] | None, key: str, rank: int, timeout: timedelta
) -> str:
    """Tell the other ranks through a store of torch's where the coordinator is, or be told.

    In a thread, because calls of that store have no deadline of their own: a host that is stopped never answers them.
    """
    answer: list[str | Exception] = []

    def work() -> None:
        try:
            opened = store()
            if publish is not None:
                opened.set(key, publish())
            answer.append(opened.get(key).decode())
        except Exception as error:  # Whatever it is, the waiting caller raises it.
            answer.append(error)

    thread = threading.Thread(target=work, name="tutti rendezvous", daemon=True)
    thread.start()
    thread.join(timeout.total_seconds() + 1)
    found = answer[0] if answer else TimeoutError("no answer")
    if isinstance(found, str):
        return found
    if isinstance(found, ConfigError):
        raise found
    raise RankLost(
        f"rank {rank}: rank 0 has not said through torch's store where the run's coordinator is "
        f"({str(found).partition(chr(10))[0]}). Rank 0 was not started or has ended, MASTER_ADDR or MASTER_PORT is "
        "wrong, or a firewall is between."
    )


_served: list[Coordinator] = []
"""The coordinator that this process serves, if it does."""


def _serve(listening: socket.socket, address: str) -> Coordinator:
    made = Coordinator(listening, find_secret(), host_id=host_id(), address=address, patience=find_patience())
    _served.append(made)
    # No launcher of Tutti's shows who holds the others up, so this process does.
    diagnosis = DiagnosisThread(made)
    # Handlers run in the reverse order: this one after those that close the world and say bye.
    atexit.register(_serve_to_the_end, made, diagnosis, os.getpid())
    return made


def _serve_to_the_end(coordinator: Coordinator, diagnosis: DiagnosisThread, served_by: int) -> None:
    """Keep this process until the other ranks have ended: they may still need the coordinator that it serves."""
    if os.getpid() != served_by:
        return  # A child that was forked has the handlers, and not the thread that serves.
    started, told = time.monotonic(), False
    own = {member.description.id for member in _members.values()}  # Whose bye may not have come yet.
    # Ended by the other ranks, which leave or are lost; by Ctrl-C; and at once if this rank has failed.
    while (ranks := coordinator.present(own)) and getattr(sys, "last_value", None) is None:
        if not told and time.monotonic() - started > 5:
            told = True
            names = ", ".join(map(str, ranks))
            print(f"tutti: rank 0 serves the run's coordinator and waits for rank {names} to end", file=sys.stderr)
        time.sleep(0.05)
    diagnosis.close(failed=getattr(sys, "last_value", None) is not None)
    coordinator.close()


def listener(address: str, port: int) -> socket.socket:
    """Open the coordinator's listening socket: on the address that others use, and no other."""
    try:
        family, _, _, _, found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise EnvironmentConflict(f"rank 0: MASTER_ADDR '{address}' is not known here ({error.strerror}).") from error
    # Some systems give their own name an address of loopback, which other hosts do not reach.
    if is_loopback(str(found[0])) and not is_loopback(address):
        found = ("", port)
    opened = socket.socket(family)
    # A restarted job binds the same port while connections of the old one are still in TIME_WAIT.
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind(found)
        # All ranks of a large world connect at about the same time. The kernel may allow fewer (net.core.somaxconn).
        opened.listen(4096)
    except OSError as error:
        opened.close()
        mend = "Choose another MASTER_PORT."
        if isinstance(error, OSError) and error.errno == 99:  # EADDRNOTAVAIL
            mend = f"Rank 0 runs on this host, and {address} is an address of another: set MASTER_ADDR to this one's."
        raise EnvironmentConflict(
            f"rank 0: cannot listen on {address} port {port} ({error.strerror}). {mend}"
        ) from error
    return opened
