"""A process's view of its job: what the coordinator has told it, and waits for what is to come.

How it works
------------
`Member` keeps what the coordinator sends (`received`, called by one thread). Other threads read it and wait for it,
under one condition, `_changed`, which guards all fields. All reads are local: they ask nobody.

What this process sends goes through its `Outbox`, which never waits, and sends everything again over each new
connection that the coordinator has to know: joins, values, notices, and requests that wait. The members and the losses
that this process knows of are in its hello. `_changed` is never held while anything is sent.

Waits (`join`, `values`, `sync`, `table`) end when the answer comes; when `check`, which is called at every change,
raises; when this process is refused or cut off (`RankLost`); or at their deadline. While the coordinator is away, they
go on. If it was in the process of a rank, nobody starts another: after `patience` without it, waits for values and for
other members end (`RankLost`).

Who must hear of changes at once, because it waits in a selector, adds itself by `on_change`.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tutti.coordination.activity import Activity, main_stack
from tutti.coordination.coordinator import PATIENCE
from tutti.coordination.description import MemberDescription, process_state
from tutti.coordination.frames import Message
from tutti.coordination.knowledge import JobKnowledge
from tutti.coordination.outbox import Outbox
from tutti.coordination.secret import Secret
from tutti.errors import DeadlineExceeded, EnvironmentConflict, RankLost

_CHECK_S = 0.2
"""How often a wait calls its `check` when nothing changes: it may look at more than what the coordinator sends."""
_CUT_FOUND_S = 4.0
"""How much longer than the patience it takes, at most, until a process knows that it is cut off: two attempts to
connect (`tutti.coordination.link`)."""


class Member:
    """This process as a member of its job."""

    def __init__(self, description: MemberDescription, clock: Callable[[], float] = time.monotonic) -> None:
        self.description, self.clock = description, clock
        self.place = "the coordinator"
        """Where the coordinator is, for messages."""
        self.secret: Secret | None = None
        """What the members of the job share; None if they are threads of one process."""
        self.patience_s = PATIENCE.total_seconds()
        """How long a member may be silent before the others go on without it."""
        self.activity = Activity()
        """What this process is doing, which its heartbeats report."""
        self.known = JobKnowledge()
        """What the coordinator has told. A single value may be read without a lock."""
        self.connected = False
        """Whether the coordinator is there. While it is not, losses have to be noticed without it."""
        self.is_served_by_rank = False
        """Whether the coordinator is in the process of a rank, and so ends with it for good."""
        self.away_since: float | None = None
        """When the coordinator went away; None while it is there."""
        self.answered_at = clock()
        """When the coordinator's host last showed that it can be reached."""
        self.num_changes = 0
        """Grows with everything that is received: who waits sees by it that something may have changed."""
        self.outbox = Outbox()
        """What this process sends."""
        self._changed = threading.Condition()
        self._listeners: tuple[Callable[[], None], ...] = ()
        self._num_requests = 0

    def check(self) -> None:
        """Raise `RankLost` if this process may take no more part in the job, `DeadlineExceeded` if it is stuck."""
        if self.known.refused is not None:
            raise RankLost(f"rank {self.description.rank}: this process cannot go on: {self.known.refused}.")
        if self.known.stuck is not None:
            raise DeadlineExceeded(
                f"rank {self.description.rank}: ranks wait for each other, and none can go on: {self.known.stuck}. All "
                "ranks must call the same operations in the same order."
            )

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` whenever something changes, from another thread. Returns what ends that."""
        with self._changed:
            self._listeners = (*self._listeners, listener)

        def remove() -> None:
            with self._changed:
                self._listeners = tuple(each for each in self._listeners if each is not listener)

        return remove

    # What this process sends

    def set(self, key: str, value: str) -> None:
        """Set a value that others can wait for."""
        self.outbox.send(("set", key), {"op": "set", "key": key, "value": value})

    def propose(self, key: str, value: str) -> None:
        """Set a value unless another member was first: `values` returns what all members get."""
        self.outbox.send(("propose", key), {"op": "propose", "key": key, "value": value})

    def notice(self, scope: str, kind: str, reason: str, size: int, members: Sequence[str] = ()) -> None:
        """Announce to all members how this one's part in a scope of `size` members ends.

        Args:
            members: who they are, where the scope is a channel and not all members of its world are in it.
        """
        message = {"op": "notice", "scope": scope, "kind": kind, "reason": reason, "size": size}
        self.outbox.send(("notice", scope, kind), {**message, "members": list(members)})

    def bye(self) -> None:
        """Announce that this process takes no more part in the job."""
        self.outbox.post({"op": "bye"})

    # Waits

    def join(
        self,
        scope: str,
        rank: int,
        size: int,
        timeout_s: float,
        waiting: Callable[[list[int], float], None] = lambda ranks, seconds: None,
    ) -> list[MemberDescription] | None:
        """Enter a scope as `rank`, wait for all others, and return who they are, by rank; None after `timeout_s`.

        Args:
            waiting: called every few seconds with the ranks that are missing, and for how long they are waited for.

        Raises `EnvironmentConflict` if another process has that rank.
        """
        told = 0.0

        def check() -> None:
            nonlocal told
            if (conflict := self.known.conflicts.get(scope)) is not None:
                raise EnvironmentConflict(f"rank {rank}: {conflict}.")
            check_coordinator(self)
            ranks, seconds = self.known.missing.get(scope, ([], 0.0))
            if seconds > told:
                told = seconds
                waiting(ranks, seconds)

        self.outbox.send(("join", scope), {"op": "join", "scope": scope, "rank": rank, "size": size})
        self.wait(lambda: scope in self.known.rosters, check, timeout_s)
        return self.known.rosters.get(scope)

    def values(self, keys: list[str], timeout_s: float, check: Callable[[], None] = lambda: None) -> list[str] | None:
        """Wait until all values are set, and return them; None after `timeout_s`."""

        def check_all() -> None:
            check()  # First: it may know which rank is gone.
            check_coordinator(self)

        return self.request({"op": "get", "keys": keys}, timeout_s, check_all)

    def sync(self, timeout_s: float) -> bool:
        """Wait until the coordinator has handled all that this process sent; False after `timeout_s`."""
        return self.request({"op": "sync"}, timeout_s, lambda: None) is not None

    def ask_stack(self, rank: int) -> None:
        """Have the coordinator ask a rank for its Python stack, which `table` has a moment later."""
        self.outbox.post({"op": "ask_stack", "rank": rank})

    def table(self, timeout_s: float = 2.0) -> list[dict[str, Any]] | None:
        """What the coordinator knows of every member; None after `timeout_s`."""
        self.outbox.post({"op": "beat", "status": self.activity.status()})  # So that its own row is of now.
        return self.request({"op": "query"}, timeout_s, lambda: None)

    def request(self, message: Message, timeout_s: float, check: Callable[[], None] = lambda: None) -> Any:
        """Ask the coordinator, and return its answer; None after `timeout_s`."""
        with self._changed:
            self._num_requests += 1
            number = self._num_requests
        key = ("request", str(number))
        self.outbox.send(key, {**message, "request": number})
        answered = False
        try:
            answered = self.wait(lambda: number in self.known.answers, check, timeout_s)
            return self.known.answers.get(number)
        finally:
            self.outbox.withdraw(key)
            with self._changed:
                self.known.answers.pop(number, None)
            if not answered and message["op"] == "get":
                self.outbox.post({"op": "cancel", "request": number})

    def wait(self, over: Callable[[], bool], check: Callable[[], None], timeout_s: float) -> bool:
        """Wait until `over`; return False after `timeout_s`. Ended by `received`, and by what `check` raises."""
        deadline = self.clock() + timeout_s
        while not over():
            self.check()
            check()
            left_s = deadline - self.clock()
            if left_s <= 0:
                return False
            with self._changed:
                if not over():
                    self._changed.wait(min(left_s, _CHECK_S))
        return True

    # The connection's side

    def attach(self, post: Callable[[Message], None]) -> None:
        """Send messages by `post` from now on, after everything that a coordinator has to know."""
        self.outbox.attach(post)
        self.connected, self.away_since = True, None

    def detach(self) -> None:
        """There is no connection: messages are kept for the next one."""
        if self.connected:
            self.away_since = self.clock()
        self.connected = False
        self.outbox.detach()

    def hello(self, version: str) -> Message:
        """The first message of a connection."""
        with self._changed:
            lost = dict(self.known.lost)
            met = [each for roster in self.known.rosters.values() for each in roster if each.id not in lost]
        known = list({each.id: each.to_json() for each in met}.values())
        return {"op": "hello", "version": version, "member": self.description.to_json(), "known": known, "lost": lost}

    def exclude(self, reason: str) -> None:
        """This process may take no more part: all waits end."""
        self.received({"op": "refused", "reason": reason})

    def received(self, message: Message) -> None:
        """Take in a message of the coordinator. Called by one thread at a time."""
        if message["op"] == "look":
            state = process_state(message["pid"], message["started"])
            self.outbox.post({"op": "seen", "member": message["member"], "state": state})
            return
        if message["op"] == "send_stack":
            self.outbox.post({"op": "stack", "text": main_stack()})
            return
        with self._changed:
            if "request" in message and ("request", str(message["request"])) not in self.outbox:
                return  # Nobody waits for it any more, or it was answered before the connection broke.
            self.known.apply(message)
            if message["op"] == "forget":
                self.outbox.forget(message["scope"])
            self.num_changes += 1
            self._changed.notify_all()
            listeners = self._listeners
        for listener in listeners:
            listener()


def check_coordinator(member: Member) -> None:
    """Raise `RankLost` if the coordinator is gone, and with it the rank that served it."""
    since = member.away_since
    if member.is_served_by_rank and since is not None and member.clock() - since > member.patience_s:
        raise RankLost(
            f"rank {member.description.rank}: {member.place} has been gone for {member.patience_s:g} s, and with it "
            "the rank in whose process it was. See the output of rank 0."
        )


def confirm(member: Member) -> None:
    """Make sure that a process still takes part in its job. Raises `RankLost` if it does not.

    A process that is cut off sees all others as lost, and what it has alone must not count as a result. Ends when the
    coordinator answers, or when its host shows that it can be reached; or when the process is found to be cut off; or,
    if the coordinator is stopped, after a time in which a cut would have been found.
    """
    asked_at = member.clock()
    while not member.sync(_CHECK_S):
        reachable = not member.connected and member.answered_at > asked_at
        if reachable or member.clock() - asked_at > member.patience_s + _CUT_FOUND_S:
            return
