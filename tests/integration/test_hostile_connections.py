"""Strangers, liars and former members at the coordinator's port while ranks train: nothing changes for the ranks."""

import os
import random
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from test_coordinator_away import Run, digests, run, undisturbed

from tutti import __version__
from tutti.coordination import Secret, frames
from tutti.coordination.description import MemberDescription
from tutti.coordination.handshake import GREETING, _mac

CONNECTIONS = 300
"""Of each kind. The coordinator lets 128 strangers wait at a time."""

WRONG = "another secret, which nobody gave us"


class Hostile:
    """Opens connections to one coordinator; some stay open, as those of a slow or careless program do."""

    def __init__(self, job: Run) -> None:
        self._address = ("127.0.0.1", job.port)
        self.secret = job.secret
        self.random = random.Random(0)
        self.kept: list[socket.socket] = []
        self.recorded = b""
        """The bytes of a proof that was right once."""

    def connect(self) -> socket.socket:
        return socket.create_connection(self._address, 10)

    def send(self, data: bytes, *, keep: bool = False) -> None:
        opened = self.connect()
        with suppress(ConnectionError):  # It may refuse to read on.
            opened.sendall(data)
        if keep:
            self.kept.append(opened)
        else:
            opened.close()

    def proved(self, text: str) -> socket.socket | None:
        """A connection on which the secret was proved; None if the coordinator has closed it."""
        opened, secret, nonce = self.connect(), Secret(text), self.random.randbytes(32)
        opened.sendall(GREETING + nonce)
        answer = b""
        while len(answer) < 72 and (part := opened.recv(72 - len(answer))):
            answer += part
        if len(answer) < 72:
            opened.close()
            return None
        proof = _mac(secret, b"member", nonce + answer[8:40])
        self.recorded = GREETING + nonce + proof
        opened.sendall(proof)
        return opened

    def say(self, *messages: bytes) -> None:
        """Prove the right secret, send messages, and wait until the coordinator has closed or has answered."""
        opened = self.proved(self.secret)
        if opened is None:
            return  # Too many strangers at this moment: this one was the oldest.
        with closing(opened), suppress(ConnectionError):
            opened.sendall(b"".join(messages))
            opened.recv(1)

    def hello(self, member: dict[str, Any], **fields: Any) -> bytes:
        message = {"op": "hello", "version": __version__, "member": member, "known": [], "lost": {}, **fields}
        return frames.encode(message)

    def close(self) -> None:
        for opened in self.kept:
            opened.close()


def wrong_secret(hostile: Hostile) -> None:
    if (opened := hostile.proved(WRONG)) is not None:
        with closing(opened), suppress(ConnectionError):
            assert opened.recv(1) == b"", "nothing is said to who does not know the secret"


def forged(hostile: Hostile, number: int) -> None:
    """Lies of somebody who has the secret."""
    own = MemberDescription(f"liar{number}", 1, "h", "h", 1, 1).to_json()
    lies = [
        hostile.hello(own) + b"\x80\x00\x00\x00",  # A message of 2 GiB.
        hostile.hello(own) + frames.HEADER.pack(20) + b'{"op": "format_disk"}'[:20],
        hostile.hello(own) + frames.encode({"op": "join", "scope": "world", "rank": 0, "size": 1 << 50}),
        hostile.hello(own) + frames.encode({"op": "beat", "status": {"waits": 3}}),
        hostile.hello(own) + frames.encode({"op": "seen", "member": "nobody", "state": "ended"}),
        hostile.hello(own, lost={f"nobody{number}": "gone"}, known=[own]),
        hostile.hello({**own, "rank": "0"}),
        hostile.hello(own, version="0.0.1"),
        frames.encode({"op": "beat", "status": {}}),
        frames.HEADER.pack(3) + b"[]]",
    ]
    hostile.say(lies[number % len(lies)])


KINDS: dict[str, Callable[[Hostile, int], None]] = {
    "garbage": lambda hostile, _: hostile.send(hostile.random.randbytes(200)),
    "half-open": lambda hostile, _: hostile.send(b"", keep=True),
    "slow bytes": lambda hostile, _: hostile.send(GREETING[:3], keep=True),
    "oversized length": lambda hostile, _: hostile.send(struct.pack("!I", 1 << 31) + b"x" * 64),
    "wrong secret": lambda hostile, _: wrong_secret(hostile),
    "replayed": lambda hostile, _: hostile.send(hostile.recorded, keep=True),
    "forged": forged,
}


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
    hostile = Hostile(job)
    hostile.say(hostile.hello(MemberDescription("first", -1, "h", "h", 1, 1).to_json()))  # There is a proof to replay.
    with closing(hostile):
        job.ranks[0].line("step")
        files, resident = resources(job.coordinator.pid)
        job.ranks[0].go()
        for number in range(CONNECTIONS):
            for attack in KINDS.values():
                attack(hostile, number)
        job.ranks[0].line("step")
        files_after, resident_after = resources(job.coordinator.pid)
        assert files_after <= files + 128 + 8, "strangers that wait, and a few that just come"
        assert resident_after < resident + 20_000
        hostile.close()
        job.ranks[0].go()
        assert digests(job) == {undisturbed("sockets")}
    assert job.coordinator.said.startswith("coordinator ")
    os.kill(job.coordinator.pid, 9)
    job.coordinator.end()
    assert "Traceback" not in job.coordinator.said
