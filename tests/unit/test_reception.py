"""Who is let in at the port of a channel, and how little strangers cost."""

import os
import resource
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from types import SimpleNamespace

import pytest

from support import SECRET
from tutti.coordination import LocalCoordinator, Secret
from tutti.coordination.certificates import context
from tutti.coordination.knowledge import LEFT
from tutti.transports import Membership, Peer
from tutti.transports.sockets import reception as module
from tutti.transports.sockets.frames import HELLO_BYTES, make_hello
from tutti.transports.sockets.reception import Reception

SIZE = 3


class Clock:
    """The time that the reception sees."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=made.monotonic))
    return made


class Port:
    """The reception of rank 0, of a world of three ranks."""

    def __init__(self, hosts: tuple[str, ...], secret: Secret | None) -> None:
        peers = [Peer.this_process(rank, host, host) for rank, host in enumerate(hosts)]
        self.member = LocalCoordinator().member(peers[0].process)
        self.member.secret = secret
        self.membership = Membership(0, peers, self.member, "world", timedelta(seconds=5))
        self.arrived = threading.Event()
        self.reception = Reception(self.membership, self.arrived.set)
        address, number, key = self.reception.location.split()
        self.address, self.key = (address, int(number)), bytes.fromhex(key)

    def hello(self, rank: int) -> bytes:
        return make_hello(self.key, self.address[1], rank)

    def connect(self, data: bytes = b"") -> socket.socket:
        """A connection that has sent `data`."""
        made = socket.create_connection(self.address, 20)
        made.sendall(data)
        return made

    def ranks(self) -> list[int]:
        """The ranks that have been let in."""
        if not self.reception.has_thread:
            self.reception.poll()
        return [rank for _, rank in self.reception.arrivals]


@contextmanager
def opened(hosts: tuple[str, ...] = ("a",) * SIZE, secret: Secret | None = None) -> Iterator[Port]:
    port = Port(hosts, secret)
    try:
        yield port
    finally:
        port.reception.close()


@pytest.fixture
def port() -> Iterator[Port]:
    with opened() as made:
        yield made


def closed(connection: socket.socket) -> bool:
    """Whether the other end has closed a connection. Waits for it."""
    with suppress(ConnectionError):
        return connection.recv(1) == b""
    return True


def test_a_member_is_let_in(port: Port) -> None:
    with port.connect(port.hello(2)), port.connect(port.hello(1)):
        assert port.ranks() == [2, 1]
        assert port.arrived.is_set()
        assert port.reception.num_strangers == 0


def test_what_a_member_sends_behind_its_hello_is_left_for_its_user(port: Port) -> None:
    with port.connect(port.hello(1) + b"more"):
        assert port.ranks() == [1]
        assert port.reception.arrivals[0][0].recv(100) == b"more"


def test_a_hello_in_pieces(port: Port) -> None:
    hello = port.hello(1)
    with port.connect() as member:
        for number in range(HELLO_BYTES):
            assert port.ranks() == []
            member.sendall(hello[number : number + 1])
        assert port.ranks() == [1]


def changed(hello: bytes, position: int, by: int) -> bytes:
    """The same hello but for bits of one byte."""
    data = bytearray(hello)
    data[position] ^= by
    return bytes(data)


HOSTILE: dict[str, Callable[[Port], bytes]] = {
    "nothing but zeros": lambda port: bytes(HELLO_BYTES),
    "another protocol": lambda port: b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n" + bytes(100),
    "another key": lambda port: make_hello(bytes(32), port.address[1], 1),
    "another port": lambda port: make_hello(port.key, port.address[1] ^ 1, 1),
    "the rank that listens": lambda port: port.hello(0),
    "a rank that is none": lambda port: port.hello(SIZE),
    "the highest rank there is": lambda port: port.hello(2**32 - 1),
    "a rank changed on the way": lambda port: changed(port.hello(1), 8, by=1 ^ 2),
    "one bit of the proof changed": lambda port: changed(port.hello(1), -1, by=1),
    "TLS where it is not expected": lambda port: b"\x16\x03\x01" + bytes(HELLO_BYTES),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_who_does_not_prove_to_be_a_member_is_turned_away(port: Port, data: Callable[[Port], bytes]) -> None:
    with port.connect(data(port)) as stranger:
        assert port.ranks() == []
        assert closed(stranger)
        assert port.reception.num_strangers == 0
    with port.connect(port.hello(1)):
        assert port.ranks() == [1]


@pytest.mark.parametrize("first_ends", [False, True], ids=["while the first lives", "after the first has ended"])
def test_a_recorded_hello_opens_nothing(port: Port, first_ends: bool) -> None:
    hello = port.hello(1)
    with port.connect(hello) as first:
        assert port.ranks() == [1]
        if first_ends:
            first.close()
            port.reception.arrivals.popleft()[0].close()
        before = port.ranks()
        with port.connect(hello) as replayed:
            assert port.ranks() == before
            assert closed(replayed)


def test_a_second_connection_of_a_rank_does_not_replace_the_first(port: Port) -> None:
    with port.connect(port.hello(1)) as first, port.connect(port.hello(1)) as second:
        assert port.ranks() == [1]
        assert closed(second)
        first.sendall(b"x")
        assert port.reception.arrivals[0][0].recv(1) == b"x"


@pytest.mark.parametrize("reason", ["its process 7 on b was silent for 10 s: it is stopped", LEFT])
def test_a_former_member(port: Port, reason: str) -> None:
    """Evicted, it stays out. If it left by itself, what it sent before is still read."""
    lost = port.membership.peers[1].process.id
    port.member.received({"op": "lost", "member": lost, "reason": reason})
    with port.connect(port.hello(1)):
        assert port.ranks() == ([1] if reason == LEFT else [])


def test_a_stranger_has_ten_seconds_however_it_spends_them(port: Port, clock: Clock) -> None:
    hello = port.hello(1)
    with port.connect() as silent, port.connect() as slow:
        for number in range(10):
            port.reception.poll()
            assert port.reception.num_strangers == 2
            slow.sendall(hello[number : number + 1])
            clock.now += 1
        port.reception.poll()
        assert port.reception.num_strangers == 0
        assert closed(silent)
        assert closed(slow)


def test_many_strangers_are_bounded_and_a_member_gets_in_beside_them(port: Port, clock: Clock) -> None:
    with ExitStack() as stack:
        strangers = [stack.enter_context(port.connect()) for _ in range(300)]
        member = stack.enter_context(port.connect())
        rounds = 0
        while port.ranks() == []:
            assert port.reception.num_strangers <= 128
            clock.now += 0.05
            rounds += 1
            assert rounds < 60, "a member that comes last is let in within three seconds"
            if rounds == 5:
                member.sendall(port.hello(1))
        assert closed(strangers[0])
        clock.now += 20
        port.reception.poll()
        assert port.reception.num_strangers <= 128


def test_strangers_that_come_at_once_do_not_push_out_a_member(port: Port, clock: Clock) -> None:
    """Its connection is accepted before its hello has come: it has a moment, however many come after it."""
    with ExitStack() as stack:
        member = stack.enter_context(port.connect())
        port.reception.poll()
        for _ in range(300):
            stack.enter_context(port.connect())
        for _ in range(10):
            port.reception.poll()
        member.sendall(port.hello(1))
        assert port.ranks() == [1]


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers: list[int] = []
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, before[1]))
    try:
        with suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for filler in fillers:
            os.close(filler)


def test_without_descriptors_the_oldest_stranger_goes_and_accepting_pauses(port: Port, clock: Clock) -> None:
    with port.connect() as oldest, socket.socket() as late, socket.socket() as later:
        port.reception.poll()
        assert port.reception.num_strangers == 1
        with no_descriptors_left():
            late.connect(port.address)
            later.connect(port.address)
            port.reception.poll()
            assert port.reception.num_strangers == 0
            # Nothing is reported while it pauses, so that nobody spins.
            assert port.reception._selector.select(0) == []
            clock.now += 0.2
            port.reception.poll()
        oldest.settimeout(20)
        assert closed(oldest)
        late.sendall(port.hello(1))
        for _ in range(3):
            clock.now += 0.2
            port.reception.poll()
        assert port.ranks() == [1]


def test_closing_ends_everybody(port: Port) -> None:
    with port.connect() as stranger, port.connect(port.hello(1)) as member:
        port.reception.poll()
        port.reception.close()
        assert closed(stranger)
        assert closed(member)


# --- encrypted ---


@pytest.fixture
def secure(monkeypatch: pytest.MonkeyPatch) -> Iterator[Port]:
    """Rank 1 is on another host, rank 2 on the same one; loopback is taken for a network."""
    monkeypatch.setattr("tutti.coordination.handshake.is_loopback", lambda address: False)
    with opened(("a", "b", "a"), SECRET) as made:
        yield made


def over_tls(port: Port, secret: Secret, data: bytes) -> ssl.SSLSocket:
    made = context(secret, server=False).wrap_socket(socket.create_connection(port.address, 20))
    made.sendall(data)
    return made


def test_members_of_other_hosts_are_let_in_over_tls(secure: Port) -> None:
    with over_tls(secure, SECRET, secure.hello(1)) as member:
        assert member.version() == "TLSv1.3"
        assert secure.arrived.wait(20)
        assert secure.ranks() == [1]


def test_members_of_this_host_are_let_in_without_tls(secure: Port) -> None:
    with secure.connect(secure.hello(2)):
        assert secure.arrived.wait(20)
        assert secure.ranks() == [2]


def test_another_secret_does_not_get_through_the_handshake(secure: Port) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        over_tls(secure, Secret("another secret than theirs"), b"")
    careless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    careless.check_hostname, careless.verify_mode = False, ssl.CERT_NONE
    with careless.wrap_socket(socket.create_connection(secure.address, 20)) as without_certificate:
        with suppress(OSError):
            without_certificate.sendall(secure.hello(1))
        with pytest.raises(OSError, match=r"CERTIFICATE_REQUIRED|reset|Broken"):
            assert without_certificate.recv(1)
    assert secure.ranks() == []


TURNED_AWAY: dict[str, Callable[[Port], bytes]] = {
    "a plain hello from another host": lambda port: port.hello(1),
    "no TLS": lambda port: b"GET / HTTP/1.1\r\n\r\n" + bytes(100),
    "garbage that begins like TLS": lambda port: b"\x16\x03\x01\x00\x20" + bytes(200),
    "an oversized record": lambda port: b"\x16\x03\x01\xff\xff" + bytes(70_000),
}


@pytest.mark.parametrize("data", TURNED_AWAY.values(), ids=TURNED_AWAY)
def test_bytes_that_are_not_tls_are_turned_away(secure: Port, data: Callable[[Port], bytes]) -> None:
    with socket.create_connection(secure.address, 20) as stranger:
        with suppress(OSError):  # It may be closed before all was sent.
            stranger.sendall(data(secure))
        while True:
            with suppress(ConnectionError):
                if stranger.recv(1000):  # An alert of TLS.
                    continue
            break
    assert secure.ranks() == []


def test_a_hello_over_tls_must_prove_the_rank_as_well(secure: Port) -> None:
    with over_tls(secure, SECRET, make_hello(bytes(32), secure.address[1], 1)) as stranger:
        assert closed(stranger)
    assert secure.ranks() == []


def test_half_a_handshake_ends_at_the_deadline(secure: Port, clock: Clock) -> None:
    with secure.connect(b"\x16\x03\x01\x02\x00") as stranger, secure.connect() as silent:
        while secure.reception.num_strangers < 2:
            time.sleep(0.001)  # Until its thread has accepted both.
        clock.now += 11
        assert closed(stranger)
        assert closed(silent)
