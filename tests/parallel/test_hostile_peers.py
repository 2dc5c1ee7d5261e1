"""Bytes that no rank of Tutti sends: from strangers during training, and from members that prove who they are."""

import gc
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from support import run_ok, run_threads
from tutti.collectives import ring
from tutti.errors import DeadlineExceeded, RankLost
from tutti.transports import SocketTransport
from tutti.transports.sockets import matching
from tutti.transports.sockets.frames import DTYPE_CODES, DTYPES, HEADER, make_hello
from tutti.transports.sockets.messenger import Messenger
from tutti.world import World

FLOAT = DTYPE_CODES[torch.float32]


@pytest.fixture(params=["sockets", "tls"])
def transport(request: pytest.FixtureRequest) -> str:
    """Messages in the clear, and encrypted."""
    return str(request.param)


def messenger_of(world: World) -> Messenger:
    assert isinstance(world.transport, SocketTransport)
    return world.transport._messenger


def send_raw(world: World, data: bytes) -> socket.socket:
    """Connect to rank 0 as this rank and send bytes that no `isend` writes."""
    out = messenger_of(world).connector.connect(0)
    hello = bytes(out.queue.popleft()[0])
    out.socket.setblocking(True)
    out.socket.sendall(hello + data)
    return out.socket


MALFORMED = {
    "an unknown dtype": (HEADER.pack(0, 4, len(DTYPES)), f"of the unknown dtype {len(DTYPES)} "),
    "the highest dtype there is": (HEADER.pack(0, 4, 2**32 - 1), "of the unknown dtype 4294967295 "),
    "half an element": (HEADER.pack(0, 6, FLOAT), "of 6 bytes of torch.float32, which no tensor has"),
    "more than any tensor": (HEADER.pack(0, 2**40 + 4, FLOAT), "of 1099511627780 bytes of torch.float32"),
    "the highest length there is": (HEADER.pack(0, 2**64 - 4, FLOAT), "of 18446744073709551612 bytes"),
    "another tag": (HEADER.pack(77, 2**41, FLOAT), "of 2199023255552 bytes"),
}


@pytest.mark.parametrize("case", MALFORMED.values(), ids=MALFORMED)
def test_a_header_that_no_tensor_has_is_the_failure_of_its_rank(
    case: tuple[bytes, str], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, fault = case
    over = threading.Event()
    monkeypatch.setattr("tutti.transports.sockets.health.EXPLAIN_SECONDS", 0.05)  # Nobody else knows anything.

    def work(world: World) -> None:
        if world.rank == 1:
            send_raw(world, data + bytes(100))
            assert over.wait(30)
        if world.rank == 0:
            with pytest.raises(RankLost, match=f"rank 0: rank 1 is gone: it sent a message {fault}"):
                world.transport.irecv(torch.zeros(1), 1).wait()
            over.set()

    run_ok(work, size=2, transport=transport)


def test_a_malformed_message_does_not_end_what_others_send(transport: str) -> None:
    def work(world: World) -> float:
        got = torch.zeros(1)
        if world.rank == 0:
            while not messenger_of(world).ended:
                messenger_of(world).connections.step(0.1)
            world.transport.isend(got, 2).wait()
            world.transport.irecv(got, 2).wait()
        elif world.rank == 1:
            send_raw(world, HEADER.pack(0, 4, 2**20))
            with pytest.raises(RankLost):
                world.transport.irecv(got, 2).wait()
        else:
            world.transport.irecv(got, 0).wait()
            world.transport.isend(torch.tensor([3.0]), 0).wait()
        return float(got)

    assert run_ok(work, size=3, transport=transport) == [3.0, 0.0, 0.0]


def test_a_length_that_a_receive_does_not_expect_is_not_allocated(transport: str) -> None:
    """Half a terabyte is said to come, and some of it comes: it is dropped as it comes."""

    def work(world: World) -> None:
        if world.rank == 1:
            send_raw(world, HEADER.pack(0, 2**39, FLOAT) + bytes(2**20)).close()
            return
        before = memory_bytes()
        with pytest.raises(RankLost, match="rank 1 is gone"):
            world.transport.irecv(torch.zeros(3), 1).wait()
        assert memory_bytes() - before < 50e6

    run_ok(work, size=2, transport=transport)


@pytest.mark.parametrize("numel", [0, 100, 100_000])
def test_what_nobody_asks_for_is_kept_only_up_to_a_limit(
    numel: int, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest waits in the network, and arrives in order when it is asked for."""
    limit = 100 * (4 * numel + matching._MESSAGE_BYTES)
    monkeypatch.setattr(matching, "_KEPT_BYTES", limit)
    number = 400

    def work(world: World) -> list[float]:
        link = world.transport
        if world.rank == 1:
            sent = [link.isend(torch.full((numel,), float(value)), 0, tag=value % 3) for value in range(number)]
            sent.append(link.isend(torch.ones(1), 0, tag=9))
            for each in sent:
                each.wait()
            return []
        # A receive for what comes last: without the limit, everything before it would be kept.
        last, messenger = link.irecv(torch.zeros(1), 1, tag=9), messenger_of(world)
        while not messenger.connections.held:
            messenger.connections.step(0.1)
        kept = sum(map(len, messenger.matcher.unexpected.values()))
        assert 90 <= kept <= 101, kept
        got = []
        for value in range(number):
            tensor = torch.zeros(numel)
            link.irecv(tensor, 1, tag=value % 3).wait()
            got.append(float(tensor.sum()) / max(numel, 1))
        last.wait()
        assert messenger.matcher._kept_bytes[1] == 0
        assert messenger.matcher.unexpected == {}
        return got

    expected = [float(value) if numel else 0.0 for value in range(number)]
    assert run_ok(work, size=2, transport=transport)[0] == expected


def test_a_wait_behind_a_message_that_nobody_asks_for_names_it(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "_KEPT_BYTES", 1_000_000)

    def work(world: World) -> None:
        if world.rank == 1:
            world.transport.isend(torch.ones(1_000_000), 0, tag=4)
            world.transport.isend(torch.ones(1), 0)
            assert over.wait(30)
            return
        with pytest.raises(DeadlineExceeded, match=r"sent 4000000 bytes with tag 4 that no receive asks for"):
            world.transport.irecv(torch.zeros(1), 1).wait()
        over.set()

    over = threading.Event()
    results = run_threads(work, size=2, transport=transport, timeout=timedelta(seconds=2))
    assert results == [None, None]


def test_a_rank_that_does_not_read_for_long_is_not_cut_off(transport: str) -> None:
    """Its kernel acknowledges: it is slow, and slow is not lost, however much longer than the patience it takes."""

    def work(world: World) -> float:
        messenger = messenger_of(world)
        messenger.membership.member.patience_s = 0.5
        if world.rank == 0:
            sending = world.transport.isend(torch.ones(4_000_000), 1, tag=1)
            until = time.monotonic() + 2.5
            while time.monotonic() < until:
                messenger.connections.step(0.1)
                messenger.connections.check()
            world.transport.isend(torch.ones(1), 1, tag=2)
            sending.wait()
            go.set()
            return 0.0
        got = torch.zeros(4_000_000)
        assert not go.wait(3)
        world.transport.irecv(got, 0, tag=1).wait()
        return float(got.sum())

    go = threading.Event()
    assert run_ok(work, size=2, transport=transport)[1] == 4_000_000.0


# --- strangers during training ---


def memory_bytes() -> int:
    """What this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


ATTACKS: dict[str, Callable[[random.Random], bytes]] = {
    "half-open": lambda choose: b"",
    "garbage": lambda choose: choose.randbytes(choose.randrange(1, 200)),
    "a wrong proof": lambda choose: make_hello(choose.randbytes(32), 1, choose.randrange(4)) + bytes(64),
    "half a hello": lambda choose: make_hello(choose.randbytes(32), 1, 1)[:20],
    "TLS that breaks off": lambda choose: b"\x16\x03\x01\x02\x00\x01" + choose.randbytes(30),
    "oversized": lambda choose: HEADER.pack(0, 2**50, 1) * 1000,
}


def attack(ports: list[int], number: int, seed: int) -> int:
    """Open `number` hostile connections, a hundred at a time; return how many could be opened."""
    choose, opened, kept = random.Random(seed), 0, []
    kinds = list(ATTACKS.values())
    for _ in range(number):
        with suppress(OSError):  # It may be closed while it is made.
            made = socket.create_connection(("127.0.0.1", choose.choice(ports)), 20)
            kept.append(made)
            opened += 1
            made.sendall(choose.choice(kinds)(choose))
        if len(kept) >= 100:
            kept.pop(choose.randrange(len(kept))).close()
    for made in kept:
        made.close()
    return opened


def test_hostile_connections_during_training(transport: str) -> None:
    """Two thousand of them beside sums: every sum is right, and descriptors and memory are as before."""
    ports: list[int] = []
    ready, over = threading.Barrier(3), threading.Event()
    most_strangers, opened = [0], [0]

    def work(world: World) -> int:
        link, messenger = world.transport, messenger_of(world)
        ring(torch.ones(1), link)
        ports.append(messenger.connections.reception.port)
        ready.wait(30)
        steps = 0
        while True:
            # The last element says on which step both stop.
            tensor = torch.full((2000,), float(world.rank + steps))
            tensor[-1] = float(over.is_set() and world.rank == 0)
            ring(tensor, link)
            assert torch.equal(tensor[:-1], torch.full((1999,), 2.0 * steps + 1))
            most_strangers[0] = max(most_strangers[0], messenger.connections.reception.num_strangers)
            steps += 1
            if tensor[-1] > 0:
                return steps

    def attacker() -> None:
        ready.wait(30)
        before = num_descriptors(), memory_bytes()
        opened[0] = attack(list(ports), 2000, seed=1)
        gc.collect()
        grown.append((num_descriptors() - before[0], memory_bytes() - before[1]))
        over.set()

    grown: list[tuple[int, int]] = []
    thread = threading.Thread(target=attacker)
    thread.start()
    try:
        steps = run_ok(work, size=2, transport=transport)
    finally:
        over.set()
        thread.join(40)
    assert steps[0] == steps[1] > 1
    assert opened[0] > 1900
    assert most_strangers[0] <= 128
    descriptors, memory = grown[0]
    assert descriptors <= 2 * 128
    assert memory < 100e6
