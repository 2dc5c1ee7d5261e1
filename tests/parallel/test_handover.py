"""Files that ranks of one host hand to each other: whoever else asks, and whoever dies meanwhile."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta

import pytest

from tutti.coordination import LocalCoordinator
from tutti.errors import DeadlineExceeded, RankLost
from tutti.transports import Membership, Peer
from tutti.transports.shared_memory import handover
from tutti.transports.shared_memory.handover import _REQUEST, _Exchange, exchange_files


def memberships(size: int, timeout_s: float = 20) -> list[Membership]:
    coordinator = LocalCoordinator()
    peers = [Peer.this_process(rank, "host", "host") for rank in range(size)]
    members = [coordinator.member(peer.process) for peer in peers]
    return [Membership(rank, peers, members[rank], "world", timedelta(seconds=timeout_s)) for rank in range(size)]


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def memory(rank: int) -> Iterator[int]:
    """A file that says whose it is."""
    file = os.memfd_create("test")
    os.write(file, str(rank).encode())
    yield file
    os.close(file)


def owners(files: list[int]) -> list[int]:
    """Whose files these are. Closes them."""
    found = [int(os.pread(file, 10, 0)) for file in files]
    for file in files:
        os.close(file)
    return found


def in_thread(function: Callable[[], object]) -> Callable[[], object]:
    """Start `function`; the returned function waits for it, and returns its result or raises its error."""
    results: list[object] = []

    def work() -> None:
        try:
            results.append(function())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=work)
    thread.start()

    def result() -> object:
        thread.join(40)
        assert results, "it hangs"
        if isinstance(results[0], BaseException):
            raise results[0]
        return results[0]

    return result


def test_every_rank_gets_every_file_and_nothing_is_left_open() -> None:
    members = memberships(4)

    def work(rank: int) -> list[list[int]]:
        found = []
        for number in range(20):
            with memory(rank) as file:
                found.append(owners(exchange_files(members[rank], f"exchange/{number}", file)))
        return found

    before = num_descriptors()
    for result in [in_thread(lambda rank=rank: work(rank)) for rank in range(4)]:  # type: ignore[misc]
        assert result() == [[0, 1, 2, 3]] * 20
    assert num_descriptors() == before


class Pair:
    """Two ranks that are about to exchange files."""

    def __init__(self, stack: ExitStack, timeout_s: float = 20) -> None:
        self.members = memberships(2, timeout_s)
        self.files = [stack.enter_context(memory(rank)) for rank in range(2)]
        self.exchanges = [_Exchange(self.members[rank], self.files[rank]) for rank in range(2)]
        self.locations = [exchange.location for exchange in self.exchanges]
        for exchange in self.exchanges:
            stack.enter_context(exchange)

    def finish(self, rank: int) -> list[int]:
        exchange = self.exchanges[rank]
        exchange.finish(self.locations)
        files, exchange.files = exchange.files, {}
        return owners([files[0], files[1]])

    def finish_both(self) -> None:
        first = in_thread(lambda: self.finish(0))
        assert self.finish(1) == [0, 1]
        assert first() == [0, 1]

    def connect(self, data: bytes | None, rank: int = 0) -> socket.socket:
        """Connect to a rank as a stranger."""
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.connect("\0tutti-" + self.locations[rank].split()[0])
        if data is not None:
            made.send(data)
        return made

    def request(self, asks: int, rank: int = 0) -> bytes:
        """The request of rank `asks` for the file of `rank`."""
        return _REQUEST.pack(bytes.fromhex(self.locations[rank].split()[1]), asks)


@pytest.fixture
def pair() -> Iterator[Pair]:
    before = num_descriptors()
    with ExitStack() as stack:
        yield Pair(stack)
    assert num_descriptors() == before


STRANGERS: dict[str, Callable[[Pair], bytes | None]] = {
    "silent": lambda pair: None,
    "one byte": lambda pair: b"x",
    "garbage": lambda pair: os.urandom(_REQUEST.size),
    "too much": lambda pair: pair.request(1) + b"x",
    "a wrong token": lambda pair: _REQUEST.pack(bytes(16), 1),
    "the rank's own number": lambda pair: pair.request(0),
    "a rank that is none": lambda pair: pair.request(2),
    "the highest rank there is": lambda pair: pair.request(2**32 - 1),
}


@pytest.mark.parametrize("data", STRANGERS.values(), ids=STRANGERS)
def test_strangers_of_the_same_user_get_nothing(pair: Pair, data: Callable[[Pair], bytes | None]) -> None:
    with closing(pair.connect(data(pair))) as stranger:
        pair.finish_both()
        stranger.setblocking(False)
        with suppress(BlockingIOError):  # A silent one stays as long as the exchange.
            assert socket.recv_fds(stranger, 1, 1)[:2] == (b"", [])


ASK = """
import socket, sys
asks = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
asks.connect("\\0tutti-" + sys.argv[1])
asks.send(bytes.fromhex(sys.argv[2]))
print(len(socket.recv_fds(asks, 1, 1)[1]), flush=True)
"""


def test_the_right_token_from_another_process_opens_nothing(pair: Pair) -> None:
    first = in_thread(lambda: pair.finish(0))
    words = [sys.executable, "-c", ASK, pair.locations[0].split()[0], pair.request(1).hex()]
    assert subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout == "0\n"
    assert pair.finish(1) == [0, 1]
    assert first() == [0, 1]


TAKE_OVER = """
import socket, sys
taken = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
taken.bind("\\0tutti-" + sys.argv[1])
taken.listen()
print("ready", flush=True)
connection, _ = taken.accept()
print(len(connection.recv(100)), flush=True)
"""


def test_who_takes_over_the_name_of_a_rank_gets_no_token(pair: Pair) -> None:
    pair.exchanges[1]._listener.close()
    words = [sys.executable, "-c", TAKE_OVER, pair.locations[1].split()[0]]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(RankLost, match=r"rank 0: rank 1 is gone: .*another process listens in its place"):
            pair.finish(0)
        assert process.stdout.readline() == "0\n"


def test_many_strangers_do_not_keep_a_rank_out(pair: Pair) -> None:
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(closing(pair.connect(None)))
        pair.finish_both()
        assert len(pair.exchanges[0]._strangers) <= handover._MOST_STRANGERS


def test_a_rank_whose_connection_was_closed_for_strangers_asks_again(pair: Pair) -> None:
    first, second = pair.exchanges
    second._locations = pair.locations
    second._ask(0)
    first._listener.accept()[0].close()
    second._take(*next(iter(second._asked.values())))
    assert second._to_ask == {0}
    pair.finish_both()


def test_a_rank_that_asks_twice(pair: Pair) -> None:
    """Both connections are answered, and no descriptor is left."""
    second = pair.exchanges[1]
    second._locations = pair.locations
    second._ask(0)
    pair.finish_both()


def test_a_listener_whose_queue_is_full_stops_nobody_from_answering(pair: Pair) -> None:
    first, second = pair.exchanges
    second._locations = pair.locations
    second._ask(0)
    with ExitStack() as stack:
        full = False
        while not full:
            made = stack.enter_context(closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)))
            made.setblocking(False)
            try:
                made.connect("\0tutti-" + pair.locations[1].split()[0])
            except BlockingIOError:
                full = True
        result = in_thread(lambda: pair.finish(0))
        deadline = time.monotonic() + 20
        while first._given != {0, 1}:
            assert time.monotonic() < deadline, "it does not answer while it cannot ask"
            time.sleep(0.001)
        assert first._to_ask == {1}
        assert pair.finish(1) == [0, 1]
        assert result() == [0, 1]


@pytest.mark.parametrize("leaves", [True, False], ids=["and is known to have left", "and nobody knows it yet"])
@pytest.mark.parametrize("asked", [True, False], ids=["after it asked", "before it asked"])
def test_a_rank_that_dies_before_it_answers_is_named(pair: Pair, asked: bool, leaves: bool) -> None:
    second = pair.exchanges[1]
    if asked:
        second._locations = pair.locations
        second._ask(0)
    for opened in (second._listener, *(each for each, _ in second._asked.values())):
        opened.close()
    second._asked.clear()
    if leaves:
        pair.members[1].leave()
    with pytest.raises(RankLost, match=r"rank 0: rank 1 is gone: (it has left|its connection failed)"):
        pair.finish(0)


def test_a_rank_that_dies_while_it_is_asked_is_named(pair: Pair) -> None:
    """Its kernel has taken the request; nobody will answer it."""
    first, second = pair.exchanges
    first._locations, first._to_ask = pair.locations, {1}
    first._ask(1)
    second._listener.close()
    with pytest.raises(RankLost, match=r"rank 0: rank 1 is gone: its connection failed: .*refused"):
        pair.finish(0)


def test_a_rank_that_never_comes_is_named_at_the_deadline() -> None:
    with ExitStack() as stack:
        pair = Pair(stack, timeout_s=0.5)
        with pytest.raises(DeadlineExceeded, match=r"rank 0: waited 0\.5 s for rank 1 to share memory"):
            pair.finish(0)
