"""`MemberWatch` decides which members are lost.

- Its connection ends: it is lost as soon as its process is seen to have ended. Where nobody can see the process (on
  another host, without another member that could look), it has `_RECONNECT_S` and some round trips to connect again.
- It is silent for the patience of the run: it is evicted, unless its process is seen to run. A process that runs and
  does not report holds the interpreter's lock, and is slow, not lost.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from tutti.coordination.activity import check_status
from tutti.coordination.description import MemberDescription, ProcessState

_RECONNECT_S, _RECONNECT_ROUND_TRIPS = 0.15, 20
"""How long a member has to connect again, where nobody can see whether its process has ended: seconds, and round trips
of its connection on top. It needs three round trips, and more where packets are lost or the link is busy. Within one
site that adds next to nothing, so that a killed process is known soon."""
_LOOK_S = 0.1
"""How often the process of a member that is not heard is looked at."""
_SILENT_S = 0.8
"""From this silence on, its process is looked at."""
_KERNEL_GAVE_UP = 0.8
"""A connection that ends after a silence of this share of the patience was given up by the kernel: nothing of that host
was acknowledged or came. A process that ends is heard shortly before."""
_DOWN = "its host or the network is down"


@dataclass(eq=False)
class MemberRecord:
    """What the coordinator knows of one member."""

    description: MemberDescription
    heard_at: float
    closed_at: float | None = None
    """When its connection ended; None while it is open. In the future for a member that others know and that has not
    connected to this coordinator yet."""
    process: ProcessState | None = None
    """The state of its process when it was last looked at; None if nobody could."""
    looked_at: float = 0.0
    round_trip_s: float = 0.0
    """Shortest time in which its host has acknowledged something; 0 where there is no network."""
    status: dict[str, Any] = field(default_factory=dict)
    """What it last reported about itself."""
    stack: str = ""
    """The Python stack of its main thread, when it was last asked for."""
    stack_asked_at: float = -1e9
    has_met_others: bool = False
    """Whether it has joined a scope, here or, as others say, at the coordinator before this one."""

    def reported(self, status: dict[str, Any]) -> None:
        """Take in a heartbeat, which also shows that the process runs. Raises `ProtocolError`."""
        check_status(status)
        self.status, self.process = status, None

    @property
    def is_observer(self) -> bool:
        """Whether it only looks at the job and takes no part."""
        return self.description.rank < 0

    @property
    def id(self) -> str:
        return self.description.id

    @property
    def name(self) -> str:
        return f"process {self.description.pid} on {self.description.host}"


def note_seen(record: MemberRecord | None, state: str) -> None:
    """Note the state of a member's process, as another member of its host has seen it."""
    if record is not None and state in ("running", "stopped", "ended"):
        record.process = cast(ProcessState, state)


class Verdict(NamedTuple):
    """That a member is lost, and why."""

    reason: str
    may_run: bool = False
    """Whether its process may still be there."""


class MemberWatch:
    """Looks at members that are not heard."""

    def __init__(
        self, patience_s: float, host_id: str, look: Callable[[int, int], ProcessState], ask: Callable[..., None]
    ) -> None:
        """Watch with this patience.

        Args:
            host_id: the host whose processes `look` can see, by process id and start time.
            ask: called with a member that should look at a process of its host, and `member`, `pid`, `started`.
        """
        self._patience_s, self._host_id, self._look, self._ask = patience_s, host_id, look, ask

    def verdict(self, record: MemberRecord, members: Iterable[MemberRecord], now: float) -> Verdict | None:
        """Decide whether a member is lost; None if it is not."""
        closed, silent_s = record.closed_at, now - record.heard_at
        if closed is None and silent_s < _SILENT_S:
            return None
        self._look_at(record, members, now)
        name, patience = record.name, f"{self._patience_s:g} s"
        if record.process == "ended":
            return Verdict(f"its {name} has ended")
        silent = f"its {name} was silent for {patience}:"
        if closed is not None:
            limit_s = min(self._patience_s, _RECONNECT_S + _RECONNECT_ROUND_TRIPS * record.round_trip_s)
            if record.process is None and now - closed > limit_s:
                given_up = closed - record.heard_at > _KERNEL_GAVE_UP * self._patience_s
                return Verdict(f"{silent} {_DOWN}" if given_up else f"the connection of its {name} was closed", True)
            if now - closed > self._patience_s:
                return Verdict(f"its {name} has not connected again for {patience}", may_run=True)
        elif silent_s > self._patience_s and record.process != "running":
            return Verdict(f"{silent} {'it is stopped' if record.process == 'stopped' else _DOWN}", may_run=True)
        return None

    def _look_at(self, record: MemberRecord, members: Iterable[MemberRecord], now: float) -> None:
        """Look at the process of a member, or have a member on its host look."""
        if now - record.looked_at < _LOOK_S:
            return
        record.looked_at = now
        who = record.description
        if who.host_id == self._host_id:
            record.process = self._look(who.pid, who.started)
            return
        for other in members:
            heard = other.closed_at is None and now - other.heard_at < _SILENT_S
            if other is not record and other.description.host_id == who.host_id and heard:
                self._ask(other, member=who.id, pid=who.pid, started=who.started)
                # Until it answers: somebody can see the process, so the short time to connect again does not apply.
                record.process = record.process or "running"
                return
        record.process = None
