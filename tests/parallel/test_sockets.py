"""Messages over TCP, where it is awkward: late, large, unasked for, of the wrong kind, from nobody, from the dead."""

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch

from support import run_ok, run_threads
from tutti.collectives import native
from tutti.errors import ConfigError, DeadlineExceeded, RankLost, ReplicaMismatch
from tutti.transports import ANY, SocketTransport
from tutti.transports.base import Operation, Work
from tutti.transports.sockets.frames import DTYPE_CODES, HEADER
from tutti.world import World

LARGE = 2_000_000


@pytest.fixture(params=["sockets", "tls"])
def transport(request: pytest.FixtureRequest) -> str:
    """Messages in the clear, and encrypted."""
    return str(request.param)


def messages(world: World) -> SocketTransport:
    assert isinstance(world.transport, SocketTransport)
    return world.transport


def test_a_large_message_waits_until_it_is_asked_for(transport: str) -> None:
    """It stays in the network: the receiver keeps none of it, and the sender is held back."""

    def work(world: World) -> bool:
        link = messages(world)
        go = torch.zeros(1)
        if world.rank == 0:
            sending = link.isend(torch.ones(8 * LARGE), 1, tag=1)
            link.irecv(go, 1, tag=2).wait()
            held = not sending.done()
            sending.wait()
            return held
        while not link._messenger.connections.held:
            link._messenger.connections.step(0.1)
        kept = any(messages for messages in link._messenger.matcher.unexpected.values())
        link.isend(go, 0, tag=2).wait()
        got = torch.empty(8 * LARGE)
        link.irecv(got, 0, tag=1).wait()
        assert torch.equal(got, torch.ones(8 * LARGE))
        return not kept

    assert run_ok(work, size=2, transport=transport) == [True, True]


@pytest.mark.parametrize("first_asked", [1, 2, ANY])
def test_what_is_behind_a_large_message_can_be_had(first_asked: int, transport: str) -> None:
    def work(world: World) -> list[float]:
        link = messages(world)
        if world.rank == 0:
            sent = [link.isend(torch.full((LARGE,), 1.0 + tag), 1, tag) for tag in range(3)]
            sent.append(link.isend(torch.tensor([9.0]), 1, tag=7))
            for each in sent:
                each.wait()
            return []
        small = torch.empty(1)
        link.irecv(small, 0 if first_asked != ANY else ANY, tag=7).wait()
        found = [float(small)]
        for tag in (2, 0, 1):
            got = torch.empty(LARGE)
            link.irecv(got, ANY, tag).wait()
            found.append(float(got[-1]))
        return found

    assert run_ok(work, size=2, transport=transport)[1] == [9.0, 3.0, 1.0, 2.0]


@pytest.mark.parametrize("numel", [3, LARGE])
def test_messages_that_nobody_asked_for_yet_arrive_in_order(numel: int, transport: str) -> None:
    def work(world: World) -> list[float]:
        link = messages(world)
        if world.rank == 0:
            sent = [link.isend(torch.full((numel,), float(number)), 1) for number in range(5)]
            for each in sent:
                each.wait()
            return []
        tensors = [torch.empty(numel) for _ in range(5)]
        for each in [link.irecv(tensor, 0) for tensor in tensors]:
            each.wait()
        return [float(tensor[0]) for tensor in tensors]

    assert run_ok(work, size=2, transport=transport)[1] == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("early", [True, False], ids=["asked for before", "asked for after"])
@pytest.mark.parametrize("sent", [torch.ones(4), torch.ones(3, dtype=torch.int32), torch.ones(LARGE)], ids=str)
def test_a_message_of_another_length_or_dtype(early: bool, sent: torch.Tensor, transport: str) -> None:
    def work(world: World) -> None:
        link, go = messages(world), torch.zeros(1)
        if world.rank == 0:
            link.irecv(go, 1, tag=5).wait()
            sending = link.isend(sent, 1)
            if not early:
                link.isend(go, 1, tag=6).wait()
            sending.wait()
            link.isend(torch.tensor([7.0]), 1).wait()
            return
        got = torch.zeros(3)
        receiving = link.irecv(got, 0) if early else None
        link.isend(go, 0, tag=5).wait()
        if receiving is None:
            link.irecv(go, 0, tag=6).wait()
            receiving = link.irecv(got, 0)
        with pytest.raises(ReplicaMismatch, match=rf"rank 1: expected 3 × torch.float32 from rank 0.*{sent.numel()} ×"):
            receiving.wait()
        assert torch.equal(got, torch.zeros(3))  # Untouched.
        after = torch.zeros(1)
        link.irecv(after, 0).wait()  # And the conversation goes on.
        assert float(after) == 7.0

    run_ok(work, size=2, transport=transport)


def test_done_says_when_a_message_has_arrived(transport: str) -> None:
    def work(world: World) -> bool:
        link, got = messages(world), torch.zeros(1)
        if world.rank == 0:
            link.irecv(got, 1, tag=1).wait()
            link.isend(torch.ones(1), 1, tag=2).wait()
            return True
        receiving = link.irecv(got, 0, tag=2)
        before = receiving.done()
        link.isend(torch.ones(1), 0, tag=1).wait()
        deadline = time.monotonic() + 20
        while not receiving.done():
            assert time.monotonic() < deadline
        return not before and float(got) == 1.0

    assert run_ok(work, size=2, transport=transport) == [True, True]


def test_strangers_are_turned_away(transport: str) -> None:
    """Bytes from anyone who does not know the receiver's key change nothing, however they are cut."""

    def work(world: World) -> float:
        link, got = messages(world), torch.zeros(1)
        if world.rank == 0:
            port = link._messenger.connections.reception.port
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + bytes(100))
                with socket.create_connection(("127.0.0.1", port)) as silent:
                    link.irecv(got, 1).wait()
                    silent.sendall(b"x")
            return float(got)
        link.isend(torch.full((1,), 5.0), 0).wait()
        return 5.0

    assert run_ok(work, size=2, transport=transport) == [5.0, 5.0]


def test_a_rank_that_is_waited_for_and_leaves(transport: str) -> None:
    """Whether it ever said anything or not, and for those who send to it as well."""

    def work(world: World) -> float:
        link = messages(world)
        if world.rank == 2:
            link.isend(torch.ones(1), 0).wait()
            return 0.0
        if world.rank == 0:
            link.irecv(torch.zeros(1), 2).wait()
        started = time.monotonic()
        with pytest.raises(RankLost, match=rf"rank {world.rank}: rank 2 is gone: it has left"):
            _listen_in_vain(link) if world.rank == 0 else _send_in_vain(link)
        return time.monotonic() - started

    assert max(run_ok(work, size=3, transport=transport)) < 8


def _listen_in_vain(link: SocketTransport) -> None:
    link.irecv(torch.zeros(1), 2).wait()


def _send_in_vain(link: SocketTransport) -> None:
    while True:
        link.isend(torch.zeros(LARGE), 2).wait()


def test_the_loss_of_one_rank_does_not_end_talks_between_others(transport: str) -> None:
    def work(world: World) -> float:
        link, got = messages(world), torch.zeros(1)
        if world.rank == 2:
            return 2.0
        if world.rank == 0:
            with pytest.raises(RankLost, match="rank 2 is gone"):
                link.channel("side", [0, 2]).irecv(got, 1).wait()
            link.isend(torch.ones(1), 1).wait()
            return 1.0
        link.irecv(got, 0, tag=0).wait()
        return float(got)

    assert run_ok(work, size=3, transport=transport) == [1.0, 1.0, 2.0]


def test_steps_after_a_failure_are_not_taken(transport: str) -> None:
    def work(world: World) -> int:
        link, taken = messages(world).channel("own"), []

        def broken():  # type: ignore[no-untyped-def]
            taken.append("broken")
            raise ValueError("out of step")
            yield

        def later():  # type: ignore[no-untyped-def]
            taken.append("later")
            yield link.isend(torch.ones(1), 0)

        works = [link.start(broken()), link.start(later())]
        for started in works:
            with pytest.raises(ValueError, match="out of step"):
                started.wait()
        link.close()
        with pytest.raises(ConfigError, match="closed"):
            link.start(later())
        return len(taken)

    assert run_ok(work, size=2, transport=transport) == [1, 1]


def test_a_loop_that_is_woken_while_it_does_not_run(transport: str) -> None:
    """The thread of the loop starts operations itself: many of them before its next step must not block it."""

    def work(world: World) -> None:
        messenger = messages(world)._messenger
        for _ in range(5000):
            messenger.connections.wake()

    run_ok(work, size=2, transport=transport)


def test_channels_over_some_ranks(transport: str) -> None:
    """Numbered anew, in the order given, and errors still name ranks as the world does."""

    def work(world: World) -> object:
        link = messages(world)
        if world.rank == 1:
            link.irecv(torch.zeros(1), 0).wait()
            return None
        pair = link.channel("pair", [2, 0])
        assert (pair.rank, pair.size) == ({2: 0, 0: 1}[world.rank], 2)
        total = torch.tensor([float(world.rank)])
        pair.all_reduce(total).wait()
        if world.rank == 0:
            pair.close()
            link.isend(torch.zeros(1), 1).wait()
            link.irecv(torch.zeros(1), 2).wait()  # Stays until rank 2 has seen it.
        else:
            with pytest.raises(RankLost, match=r"rank 2: rank 0 is gone: it has closed this channel"):
                pair.irecv(torch.zeros(1), 1).wait()
            link.isend(torch.zeros(1), 0).wait()
        return float(total)

    assert run_ok(work, size=3, transport=transport) == [2.0, None, 2.0]


def test_a_peer_that_dies_in_the_middle_of_a_message_does_not_take_the_receive_with_it(transport: str) -> None:
    """A receive from anyone that began to get one rank's message gets another's instead."""
    begun = threading.Event()

    def work(world: World) -> list[float]:
        link = messages(world)
        if world.rank == 0:
            got = torch.zeros(LARGE)
            receiving = link.irecv(got, ANY, tag=3)
            while not any(incoming.message for incoming in link._messenger.connections.incoming):
                link._messenger.connections.step(0.1)
            begun.set()
            receiving.wait()
            return [float(receiving.source), float(got[0]), float(got[-1])]
        if world.rank == 1:
            out = link._messenger.connector.connect(0)
            hello = bytes(out.queue.popleft()[0])
            out.socket.setblocking(True)
            out.socket.sendall(hello + HEADER.pack(3, 4 * LARGE, DTYPE_CODES[torch.float32]) + bytes(1000))
        assert begun.wait(30)
        if world.rank == 2:
            link.isend(torch.full((LARGE,), 2.0), 0, tag=3).wait()
        return []  # Rank 1 leaves with most of its message unsent.

    assert run_ok(work, size=3, transport=transport)[0] == [2.0, 2.0, 2.0]


def test_what_a_rank_sent_before_it_left_arrives(transport: str) -> None:
    """However long it takes: here until well after the receiver has begun to look whether the sender is still there."""

    def work(world: World) -> float:
        link = messages(world)
        numel = 100_000  # More than the receiver takes unasked, less than the kernel keeps.
        if world.rank == 0:
            link.isend(torch.ones(numel), 1, tag=1).wait()
            link.isend(torch.ones(1), 1, tag=2).wait()
            return 1.0
        deadline = time.monotonic() + 30
        while not world.transport.membership.gone():  # type: ignore[attr-defined]
            assert time.monotonic() < deadline
        got = torch.zeros(numel)
        link.irecv(torch.zeros(1), 0, tag=2).wait()
        link.irecv(got, 0, tag=1).wait()
        with pytest.raises(RankLost, match="rank 0 is gone: it has left"):
            link.irecv(torch.zeros(1), 0, tag=3).wait()
        return float(got.sum())

    assert run_ok(work, size=2, transport=transport) == [1.0, 100_000.0]


def test_a_receive_from_anyone_ends_when_everyone_is_gone(transport: str) -> None:
    def work(world: World) -> float:
        started = time.monotonic()
        if world.rank == 0:
            with pytest.raises(RankLost, match="rank 1 is gone"):
                messages(world).irecv(torch.zeros(1), ANY).wait()
        return time.monotonic() - started

    assert max(run_ok(work, size=3, transport=transport)) < 8


WAITS = {
    "a message": lambda link: link.irecv(torch.ones(1), 1),
    "a peer that has not come": lambda link: link.isend(torch.ones(1), 1),
    "Gloo": lambda link: link.all_reduce(torch.ones(1)),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_closing_ends_a_wait_in_another_thread(wait: Callable[[SocketTransport], Work], transport: str) -> None:
    def work(world: World) -> float:
        if world.rank == 1:
            world.transport.irecv(torch.zeros(1), 0).wait()  # Never opens the channel.
            return 0.0
        link = messages(world).channel("own")

        def steps() -> Operation:
            yield wait(link)

        waiting = link.start(steps())
        started = time.monotonic()
        link.close()
        with pytest.raises(RankLost, match="closed"):
            waiting.wait()
        world.transport.isend(torch.zeros(1), 1).wait()
        return time.monotonic() - started

    assert run_ok(work, size=2, transport=transport)[0] < 5


def test_closing_a_world_of_several_hosts_reaches_its_channels() -> None:
    def work(world: World) -> float:
        channel = world.transport.channel("job")
        if world.rank:
            world.transport.irecv(torch.zeros(1), 0).wait()
            return 0.0
        waiting = channel.start(native.steps(torch.ones(10), channel))
        started = time.monotonic()
        for other in range(1, world.size):
            world.transport.isend(torch.zeros(1), other).wait()
        world.transport.close()
        with pytest.raises(RankLost):
            waiting.wait()
        return time.monotonic() - started

    assert run_ok(work, size=4, transport="hosts")[0] < 5


def test_work_that_can_only_fail_is_done(transport: str) -> None:
    def work(world: World) -> None:
        link = messages(world)
        if world.rank == 1:
            link.isend(torch.ones(1), 0).wait()
            return
        link.irecv(torch.ones(1), 1).wait()
        receiving, deadline = link.irecv(torch.ones(1), 1), time.monotonic() + 30
        while not receiving.done():
            assert time.monotonic() < deadline
        with pytest.raises(RankLost, match="rank 1 is gone"):
            receiving.wait()

    run_ok(work, size=2, transport=transport)


def test_a_host_that_nothing_answers_from(monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    """No refusal and no reply, as from behind a wall: the deadline ends it, and names whom it was for."""

    def unanswered(*_: object, **__: object) -> socket.socket:
        raise TimeoutError

    def work(world: World) -> None:
        if world.rank == 0:
            with pytest.raises(DeadlineExceeded, match=r"rank 0: waited 1 s for rank 1 at 127\.0\.0\.1 to let"):
                messages(world).isend(torch.ones(1), 1)
            over.set()
        assert over.wait(30)

    over = threading.Event()
    monkeypatch.setattr("tutti.transports.sockets.connector.socket.create_connection", unanswered)
    results = run_threads(work, size=2, transport=transport, timeout=timedelta(seconds=1))
    assert results == [None, None]
