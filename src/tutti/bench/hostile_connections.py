"""Hostile connections to the listening ports of a run: from strangers, from liars that have the secret, from the past.

How it works. `Attacker` opens one connection after the other, each of the next kind and at the next port. Several
threads may call it: only its counter is shared, under a lock. Some kinds stay open, as those of a slow or careless
program do; of these it keeps the newest `_MOST_KEPT`.

As a process of its own (`main`) it takes commands, one per line: "attack" and "decoy" begin, "stop" ends and is
answered by the number of connections so far. A decoy is a port of its own, at which the same connections are opened:
what they cost there is not the run's doing.
"""

import json
import random
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from typing import Any

import tutti
from tutti.coordination import Secret, frames
from tutti.coordination.description import MemberDescription
from tutti.coordination.handshake import GREETING, member_proof
from tutti.transports.sockets.frames import DTYPE_CODES, HELLO_BYTES, make_hello

_ANSWER_S = 2.0
"""How long it waits for an answer. A port that has many strangers may close instead."""
_MOST_KEPT = 200
_NUM_THREADS = 8
_WRONG = "another secret, which nobody gave us"


@dataclass(frozen=True)
class Target:
    """A listening port of a run, and what an insider knows of it."""

    port: int
    key: str
    """The secret of the run for its coordinator; the key of the listener, in hexadecimal, for messages of ranks."""
    is_coordinator: bool


class Attacker:
    """Opens hostile connections to the targets, in turn."""

    def __init__(self, targets: list[Target]) -> None:
        self._targets = targets
        self._random = random.Random(0)
        self._kept: deque[socket.socket] = deque()
        self._recorded: dict[int, bytes] = {}
        """Bytes that were right once, by port."""
        self._counting = threading.Lock()
        self.num_connections = 0
        self.num_answers = 0
        """Connections on which the coordinator has proved itself, and got a proof."""

    def next(self) -> None:
        """Open one more connection."""
        with self._counting:
            number = self.num_connections
            self.num_connections += 1
        target = self._targets[number % len(self._targets)]
        kinds = COORDINATOR_KINDS if target.is_coordinator else MESSAGE_KINDS
        attack = list(kinds.values())[number // len(self._targets) % len(kinds)]
        with suppress(OSError):  # It was refused, or closed at once.
            attack(self, target)

    def close(self) -> None:
        """Close what it has kept open."""
        while self._kept:
            self._kept.popleft().close()

    def connect(self, target: Target) -> socket.socket:
        """Open a connection."""
        return socket.create_connection(("127.0.0.1", target.port), _ANSWER_S)

    def send(self, target: Target, data: bytes, *, keep: bool = False) -> None:
        """Send bytes; then close the connection, or keep it."""
        opened = self.connect(target)
        with suppress(OSError):
            opened.sendall(data)
        if not keep:
            opened.close()
            return
        self._kept.append(opened)
        if len(self._kept) > _MOST_KEPT:
            self._kept.popleft().close()

    def garbage(self, target: Target) -> None:
        """Send bytes of no protocol."""
        self.send(target, self._random.randbytes(200))

    def replay(self, target: Target) -> None:
        """Send again what was right on another connection."""
        self.send(target, self._recorded.get(target.port, b""), keep=True)

    def say(self, target: Target, *messages: bytes, secret: str | None = None) -> None:
        """Prove a secret to the coordinator, send messages, and wait until it has closed or has answered."""
        with closing(self.connect(target)) as opened:
            nonce = self._random.randbytes(32)
            opened.sendall(GREETING + nonce)
            answer = b""
            while len(answer) < 72 and (part := opened.recv(72 - len(answer))):
                answer += part
            if len(answer) < 72:
                return  # Too many strangers at this moment: this one was the oldest.
            proof = member_proof(Secret(secret or target.key), nonce + answer[8:40])
            self._recorded[target.port] = GREETING + nonce + proof
            self.num_answers += 1
            opened.sendall(proof + b"".join(messages))
            opened.recv(1)

    def forge(self, target: Target) -> None:
        """Tell the coordinator lies, with the right secret."""
        number = self.num_connections
        own = MemberDescription(f"liar{number}", 1, "h", "h", 1, 1).to_json()
        lies = [
            hello(own) + b"\x80\x00\x00\x00",  # A message of 2 GiB.
            hello(own) + frames.encode({"op": "join", "scope": "world", "rank": 0, "size": 1 << 50}),
            hello(own) + frames.encode({"op": "beat", "status": {"waits": 3}}),
            hello(own) + frames.encode({"op": "seen", "member": "nobody", "state": "ended"}),
            hello({**own, "rank": "0"}),
            hello(own, version="0.0.1"),
            frames.encode({"op": "beat", "status": {}}),
            frames.HEADER.pack(3) + b"[]]",
        ]
        self.say(target, lies[number % len(lies)])

    def return_from_the_past(self, target: Target) -> None:
        """Come as a member that has left: the first time to leave, and then again and again."""
        left = hello(MemberDescription("former", 1, "h", "h", 1, 1).to_json())
        join = frames.encode({"op": "join", "scope": "former", "rank": 0, "size": 1})
        self.say(target, left, join, frames.encode({"op": "bye"}))

    def greet(self, target: Target, rank: int, *, right: bool = True, data: bytes = b"") -> None:
        """Say hello to a rank's port, as `rank`, and send `data`."""
        key = bytes.fromhex(target.key) if right else self._random.randbytes(32)
        greeting = make_hello(key, target.port, rank)
        if right:
            self._recorded[target.port] = greeting
        self.send(target, greeting + data)


def hello(member: dict[str, Any], **fields: Any) -> bytes:
    """The first message to a coordinator."""
    message = {"op": "hello", "version": tutti.__version__, "member": member, "known": [], "lost": {}, **fields}
    return frames.encode(message)


Attack = Callable[[Attacker, Target], None]

COORDINATOR_KINDS: dict[str, Attack] = {
    "garbage": Attacker.garbage,
    "half-open": lambda attacker, target: attacker.send(target, b"", keep=True),
    "slow": lambda attacker, target: attacker.send(target, GREETING[:3], keep=True),
    "oversized": lambda attacker, target: attacker.send(target, struct.pack("!I", 1 << 31) + b"x" * 64),
    "wrong secret": lambda attacker, target: attacker.say(target, secret=_WRONG),
    "replayed": Attacker.replay,
    "forged": Attacker.forge,
    "former member": Attacker.return_from_the_past,
}
"""Kinds of connections to a coordinator."""

_HUGE = struct.pack("<qQI", 0, 1 << 62, 0)

MESSAGE_KINDS: dict[str, Attack] = {
    "garbage": Attacker.garbage,
    "half-open": lambda attacker, target: attacker.send(target, b"", keep=True),
    "slow": lambda attacker, target: attacker.send(target, b"tutti", keep=True),
    "oversized": lambda attacker, target: attacker.send(target, bytes(HELLO_BYTES) + bytes(1 << 16)),
    "wrong secret": lambda attacker, target: attacker.greet(target, 1, right=False),
    "replayed": Attacker.replay,
    # Ranks 0 and 1 have connections already, and there are no others.
    "forged": lambda attacker, target: attacker.greet(target, 1 << 20, data=_HUGE),
    "former member": lambda attacker, target: attacker.greet(
        target, attacker.num_connections % 2, data=struct.pack("<qQI", 0, 8, max(DTYPE_CODES.values()))
    ),
}
"""Kinds of connections to the port on which a rank gets messages."""


class _Decoy:
    """A port at which everybody is let in, read once, and closed."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._run, name="decoy", daemon=True).start()

    def _run(self) -> None:
        # Ended by the end of the process.
        while True:
            opened, _ = self._listener.accept()
            with closing(opened), suppress(OSError):
                opened.settimeout(0.001)
                opened.recv(1 << 16)


def main() -> None:
    """Attack the targets in the first argument, at a rate a second in the second, as the input commands."""
    targets = [Target(**fields) for fields in json.loads(sys.argv[1])]
    rate, decoy = float(sys.argv[2]), _Decoy()
    attackers = {
        "attack": Attacker(targets),
        "decoy": Attacker([Target(**{**asdict(target), "port": decoy.port}) for target in targets]),
    }
    going: list[Attacker] = []
    over = threading.Event()

    def work() -> None:
        due = time.monotonic()
        while not over.is_set():
            # What it is late by is not made up for all at once.
            due = max(due + _NUM_THREADS / rate, time.monotonic() - 0.1)
            if going:
                going[0].next()
            over.wait(max(0.0, due - time.monotonic()))

    # Several, because some wait for answers.
    threads = [threading.Thread(target=work, name="attacker", daemon=True) for _ in range(_NUM_THREADS)]
    for thread in threads:
        thread.start()
    print("ready", flush=True)
    for line in sys.stdin:  # Ended by who started it: it closes this end, or dies.
        going[:] = [attackers[line.strip()]] if line.strip() in attackers else []
        print(attackers["attack"].num_connections, flush=True)
    over.set()
    for thread in threads:
        thread.join(2 * _ANSWER_S)
