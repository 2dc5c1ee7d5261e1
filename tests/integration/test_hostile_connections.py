"""Strangers, liars and former members at the coordinator's port while ranks train: nothing changes for the ranks."""

import os
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from test_coordinator_away import Run, digests, run, undisturbed

from tutti.bench.hostile_connections import COORDINATOR_KINDS, Attacker, Target
from tutti.coordination import Secret
from tutti.coordination.handshake import GREETING, member_proof

CONNECTIONS = 300
"""Of each kind. The coordinator lets 128 strangers wait at a time."""


def resources(pid: int) -> tuple[int, int]:
    """Open files and resident KiB of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return len(os.listdir(f"/proc/{pid}/fd")), resident


@pytest.fixture
def job() -> Iterator[Run]:
    undisturbed("sockets")
    with run(2, transport="sockets") as made:
        yield made


def test_training_is_unaffected(job: Run) -> None:
    with closing(Attacker([Target(job.port, job.secret, is_coordinator=True)])) as attacker:
        job.ranks[0].line("step")
        files, resident = resources(job.coordinator.pid)
        job.ranks[0].go()
        for _ in range(CONNECTIONS * len(COORDINATOR_KINDS)):
            attacker.next()
        job.ranks[0].line("step")
        files_after, resident_after = resources(job.coordinator.pid)
        assert files_after <= files + 128 + 8, "strangers that wait, and a few that just come"
        assert resident_after < resident + 20_000
        assert attacker.num_answers >= 3 * CONNECTIONS / 2, "most of those with the secret were let in to lie"
        attacker.close()
        job.ranks[0].go()
        assert digests(job) == {undisturbed("sockets")}
    assert job.coordinator.said.startswith("coordinator ")
    os.kill(job.coordinator.pid, 9)
    job.coordinator.end()
    assert "Traceback" not in job.coordinator.said


def test_nothing_is_said_to_who_does_not_know_the_secret(job: Run) -> None:
    with socket.create_connection(("127.0.0.1", job.port), 10) as opened, suppress(ConnectionError):
        nonce = bytes(32)
        opened.sendall(GREETING + nonce)
        answer = b""
        while len(answer) < 72:
            answer += opened.recv(72 - len(answer))
        opened.sendall(member_proof(Secret("another secret, which nobody gave us"), nonce + answer[8:40]))
        assert opened.recv(1) == b""
