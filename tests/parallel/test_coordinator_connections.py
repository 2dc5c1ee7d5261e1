"""Connections between members and a coordinator that break, or that nobody answers."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import timedelta

import pytest

from tutti.coordination import Coordinator, MemberDescription, Secret, connect_member
from tutti.coordination.link import ConnectedMember, Endpoint

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


def test_answers_that_come_late_are_not_kept(job: Job) -> None:
    member = job.member(0)
    for _ in range(5):
        member.table(timeout_s=0.0)
    assert member.sync(WITHIN_S)
    deadline = time.monotonic() + WITHIN_S
    while member.known.answers and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not member.known.answers
