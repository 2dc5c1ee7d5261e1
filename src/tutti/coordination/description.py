"""`MemberDescription`, the identity of a process in a job; and whether a process still runs."""

import os
import secrets
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tutti.coordination.frames import ProtocolError

ProcessState = Literal["running", "stopped", "ended"]


@dataclass(frozen=True)
class MemberDescription:
    """A process that takes part in a job."""

    id: str
    """Random, of this process alone: one that is started again in its place has another."""
    rank: int
    """The number that its launcher gave it, which messages name."""
    host: str
    """The name of its host, for people."""
    host_id: str
    """Equal for processes that can share memory and see each other's processes."""
    pid: int
    """Its process id on that host."""
    started: int
    """The start time of that process, as `start_time` gives it: process ids are reused."""

    @classmethod
    def this_process(cls, rank: int, host: str, host_id: str) -> "MemberDescription":
        """Describe the calling process."""
        pid = os.getpid()
        return cls(secrets.token_hex(8), rank, host, host_id, pid, start_time(pid))

    def to_json(self) -> dict[str, Any]:
        """The fields, as JSON has them."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "MemberDescription":
        """Check and take over what `to_json` returned. Raises `ProtocolError`."""
        kinds = {"id": str, "rank": int, "host": str, "host_id": str, "pid": int, "started": int}
        if (
            not isinstance(fields, dict)
            or fields.keys() != kinds.keys()
            or any(type(fields[name]) is not kind for name, kind in kinds.items())
        ):
            raise ProtocolError("a member is described by id, rank, host, host_id, pid and started")
        if any(len(text) > 300 for text in fields.values() if isinstance(text, str)) or not fields["id"]:
            raise ProtocolError("a member's description is empty or too long")
        return cls(**fields)


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot; -1 if it has ended, also if it is not reaped yet."""
    state, started = _process(pid)
    # A zombie has ended: its memory is gone, and it answers nothing.
    return -1 if state in "ZX" else started


def process_state(pid: int, started: int) -> ProcessState:
    """The state of a process of this host. Another start time: it has ended, and its number was given to a new one."""
    try:
        state, found = _process(pid)
    except OSError:  # No file can be opened now. What is not seen to have ended goes on.
        return "running"
    if state in "ZX" or found != started:
        return "ended"
    return "stopped" if state in "Tt" else "running"


def _process(pid: int) -> tuple[str, int]:
    """The state and the start time of a process, from proc(5); "X" if there is none."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()  # The command before it may contain anything.
    except (FileNotFoundError, ProcessLookupError):
        return "X", -1
    return fields[0], int(fields[19])
