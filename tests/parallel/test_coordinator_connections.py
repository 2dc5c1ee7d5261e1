"""Connections between members and a coordinator that break, or that nobody answers."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from threading import Event, Thread, Timer

import pytest

from tutti.coordination import Coordinator, MemberDescription, Secret, connect_member, forks, handshake, link
from tutti.coordination.link import ConnectedMember, Endpoint, _Unreachable
from tutti.coordination.member import confirm
from tutti.errors import ConfigError, RankLost

PATIENCE_S = 2.0
WITHIN_S = 10.0


class Job:
    """A coordinator and its members, in this process."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.secret = Secret.generate()
        listener = socket.create_server(("127.0.0.1", 0))
        patience = timedelta(seconds=PATIENCE_S)
        made = Coordinator(listener, self.secret, host_id="here", patience=patience)
        self.coordinator = self.stack.enter_context(closing(made))

    def member(self, rank: int) -> ConnectedMember:
        description = MemberDescription.this_process(rank, "here", "here")
        endpoint, limit = Endpoint("127.0.0.1", self.coordinator.port), timedelta(seconds=WITHIN_S)
        patience = timedelta(seconds=PATIENCE_S)
        made = connect_member(description, endpoint, self.secret, timeout=limit, patience=patience)
        return self.stack.enter_context(closing(made))


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    with made.stack:
        yield made


def test_a_member_that_connects_again_before_its_end_was_noticed(job: Job) -> None:
    member = job.member(0)
    # As if its connection broke on its side alone: the coordinator still holds its own end.
    second = ConnectedMember(member.description, member.endpoint, job.secret, timedelta(seconds=PATIENCE_S))
    job.stack.enter_context(closing(second))
    second.await_first_answer(WITHIN_S)
    assert second.sync(WITHIN_S)
    assert job.coordinator.present() == [0]


def test_connects_while_python_ends(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(*_: object) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    # As Python does before exit handlers run, and so before the member is closed.
    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    assert job.member(0).sync(WITHIN_S)


def test_a_connection_that_worked_is_renewed_at_once(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[tuple[float, bool]] = []
    monkeypatch.setattr(link, "_LONGEST_RETRY_S", 0.0)  # Each connection counts as one that worked for a while.
    monkeypatch.setattr(link, "_next_retry_s", lambda before_s, worked: attempts.append((before_s, worked)) or 0.0)
    member = job.member(0)
    for number in range(3):
        for opened in list(forks._registered):
            with suppress(OSError):
                if opened.getpeername():  # A listener has none.
                    opened.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + WITHIN_S
        while (len(attempts) <= number or not member.connected) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert attempts == [(0.0, True)] * 3
    assert job.coordinator.present() == [0]


def test_attempts_that_fail_become_rare() -> None:
    delays = [0.0]
    for _ in range(7):
        delays.append(link._next_retry_s(delays[-1], worked=False))
    assert delays[1:] == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
    assert link._next_retry_s(1.0, worked=True) == 0.0


def test_a_coordinator_that_is_stopped_excludes_nobody(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    member = job.member(0)
    # A listener that lets connections in and says nothing, as the kernel of a stopped process does.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(member, "endpoint", Endpoint("127.0.0.1", silent.getsockname()[1]))
        for opened in list(forks._registered):
            with suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + 3 * PATIENCE_S
        while time.monotonic() < deadline and member.known.refused is None:
            time.sleep(0.05)
        assert member.known.refused is None


@pytest.mark.parametrize("error", [BrokenPipeError(), EOFError(), OSError("no answer")])
def test_the_end_of_a_connection_alone_excludes_nobody(job: Job, error: Exception) -> None:
    member = job.member(0)
    member.answered_at -= 100 * PATIENCE_S  # The coordinator has had nothing to say.
    member._note_failure(error)
    assert member.known.refused is None


def test_a_host_that_cannot_be_reached_any_more(job: Job) -> None:
    member = job.member(0)
    member.answered_at -= 100 * PATIENCE_S
    member._note_failure(_Unreachable("no route"))
    assert "it is cut off from the coordinator" in str(member.known.refused)


def test_a_member_that_leaves_waits_until_that_is_known(job: Job) -> None:
    member, observer, free = job.member(0), job.member(-1), Event()
    job.coordinator._loop.call_soon_threadsafe(free.wait, WITHIN_S)  # It reads nothing until then.
    leaving = [Thread(target=each.close) for each in (member, observer)]
    for thread in leaving:
        thread.start()
        thread.join(0.1)
    assert all(thread.is_alive() for thread in leaving)
    free.set()
    for thread in leaving:
        thread.join(WITHIN_S)
    assert not any(each.connected for each in (member, observer))
    assert job.coordinator.present() == []


def test_observers_are_not_among_the_ranks(job: Job) -> None:
    job.member(-1)
    job.member(3)
    assert job.coordinator.present() == [3]


@pytest.fixture
def between_hosts(monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job whose connections are encrypted, as they are where they do not use loopback."""
    monkeypatch.setattr(handshake, "is_loopback", lambda address: False)
    return Job()


def test_another_secret_on_another_host(between_hosts: Job) -> None:
    with between_hosts.stack:
        assert between_hosts.member(0).sync(WITHIN_S)
        between_hosts.secret = Secret.generate()  # As a host makes one that was given none.
        with pytest.raises(ConfigError, match=r"rank 1: the coordinator at .* has another secret.*set TUTTI_SECRET"):
            between_hosts.member(1)
        assert between_hosts.coordinator.present() == [0]


def test_a_member_confirms_that_it_takes_part(job: Job) -> None:
    confirm(job.member(0))


def test_a_member_that_is_cut_off_learns_it_when_it_confirms(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    member = job.member(0)
    monkeypatch.setattr(member.outbox, "_post", lambda message: None)  # As if packets were lost.
    cut = Timer(0.3, member.exclude, ["it is cut off"])
    cut.start()
    with pytest.raises(RankLost, match="it is cut off"):
        confirm(member)
    cut.join(WITHIN_S)


def test_a_member_confirms_without_a_coordinator_whose_host_answers(job: Job) -> None:
    member = job.member(0)
    job.coordinator.close()
    started = time.monotonic()
    confirm(member)  # The kernel refuses connections, so the member is not cut off.
    assert time.monotonic() - started < PATIENCE_S


def test_values_are_not_awaited_from_a_coordinator_that_died_with_its_rank(job: Job) -> None:
    member = job.member(1)
    member.is_served_by_rank = True
    job.coordinator.close()
    started = time.monotonic()
    with pytest.raises(RankLost, match=r"rank 1: the coordinator at .* has been gone for 2 s"):
        member.values(["k"], WITHIN_S)
    assert time.monotonic() - started > PATIENCE_S / 2
    assert member.known.refused is None  # What needs no coordinator goes on.


def test_values_are_awaited_from_a_coordinator_that_may_come_back(job: Job) -> None:
    member = job.member(1)
    job.coordinator.close()
    assert member.values(["k"], 1.5 * PATIENCE_S) is None


def test_a_member_that_sends_what_is_too_long_learns_it(job: Job) -> None:
    member = job.member(0)
    member.set("k", "x" * 70_000)
    with pytest.raises(RankLost, match="cannot read what it sent: 'set' has a 'value' of 70000 characters"):
        member.values(["k"], WITHIN_S)


def test_answers_that_come_late_are_not_kept(job: Job) -> None:
    member = job.member(0)
    for _ in range(5):
        member.table(timeout_s=0.0)
    assert member.sync(WITHIN_S)
    deadline = time.monotonic() + WITHIN_S
    while member.known.answers and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not member.known.answers
