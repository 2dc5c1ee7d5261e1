"""Ownership of labs: which process made which network namespaces, and removal of those whose owner is gone.

How it works. A lab has no registry and no lock file of its own: the names of its namespaces hold the lab's name, the
number of the process that made it and that process's start time. So whether the owner is alive can be read from /proc,
also after its number was used again, and a killed owner leaves nothing but namespaces that show that they are orphans.

Only the owner removes its namespaces while it lives. Orphans are removed by the next process that starts a lab, or by
`tutti lab clear`. Starting is serialised over the machine by a lock on one file: between the check that a name is free
and the first namespace with that name no other lab can start. The kernel frees the lock if its holder is killed.
"""

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tutti.errors import ConfigError, DeadlineExceeded
from tutti.launch.lab import namespaces

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""Pattern of valid names of labs."""

# Such as "tutti-NAME-PID-STARTED-host3". A name may itself hold hyphens and digits: as the first group is greedy, the
# last two numbers are always those of the process.
_NAMESPACE = re.compile(rf"tutti-({NAME})-(\d+)-(\d+)-(switch|host\d+)")

_LOCK = Path("/run/tutti-lab.lock")
_LOCK_S = 30.0


@dataclass(frozen=True, order=True)
class Claim:
    """A lab's name, and the process that made it."""

    name: str
    pid: int
    started: int
    """When that process started, in ticks since boot. A process number alone may be another process's by now."""

    @classmethod
    def mine(cls, name: str) -> "Claim":
        """The claim of this process to a name."""
        return cls(name, os.getpid(), _start_time(os.getpid()))

    @property
    def alive(self) -> bool:
        """Whether the owner still runs."""
        return _start_time(self.pid) == self.started

    @property
    def switch(self) -> str:
        return self._namespace("switch")

    def host(self, number: int) -> str:
        """The namespace of a host."""
        return self._namespace(f"host{number}")

    def namespaces(self) -> list[str]:
        """Names of its namespaces that exist, the switch last."""
        mine = [name for name in namespaces.names() if _owner(name) == self]
        # By length before alphabet, so that host10 comes after host9.
        return sorted(mine, key=lambda name: (name == self.switch, len(name), name))

    def owner(self) -> str:
        """Describe the owner for an error message."""
        try:
            command = Path(f"/proc/{self.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            command = ""
        return f"process {self.pid} ({command.strip() or 'ended'})"

    def _namespace(self, part: str) -> str:
        return f"tutti-{self.name}-{self.pid}-{self.started}-{part}"


def existing() -> list[Claim]:
    """All labs of which any namespace exists."""
    return sorted({claim for name in namespaces.names() if (claim := _owner(name)) is not None})


def remove_orphans() -> list[Claim]:
    """Remove namespaces whose owner is gone, and no others; return the labs they belonged to."""
    dead = [claim for claim in existing() if not claim.alive]
    for claim in dead:
        namespaces.remove(claim.namespaces())
    return dead


@contextmanager
def claiming(name: str) -> Iterator[Claim]:
    """Claim a name for this process while the context lasts, in which no other lab starts; refused if a lab has it."""
    # Held while the lab is built: until its first namespace exists, its name is nowhere to be seen.
    with _one_at_a_time():
        remove_orphans()
        for other in existing():
            if other.name == name:
                raise ConfigError(
                    f"a lab named '{name}' exists already; {other.owner()} owns it. Choose another name, or end that "
                    "process first."
                )
        yield Claim.mine(name)


def _start_time(pid: int) -> int:
    from tutti.coordination.description import start_time

    return start_time(pid)


def _owner(namespace: str) -> Claim | None:
    match = _NAMESPACE.fullmatch(namespace)
    return None if match is None else Claim(match[1], int(match[2]), int(match[3]))


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Hold the machine's lock on starting labs while the context lasts. Raises `DeadlineExceeded`."""
    deadline = time.monotonic() + _LOCK_S
    with _LOCK.open("w") as file:
        while True:
            try:
                # Tried again and again instead of blocking, because flock has no deadline.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"another lab has been starting for {_LOCK_S:g} s; see who holds {_LOCK}."
                    ) from None
                time.sleep(0.01)
        # The lock ends with the file, when the context is left.
        yield
