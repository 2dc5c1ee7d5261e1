"""The coordinator's state and decisions, without sockets, threads and clocks.

How it works
------------
`CoordinatorState` is told what happened (`connect`, `receive`, `disconnect`, `tick`) and when, and puts messages for
members into `outbox`, in the order in which they must be delivered. So it can be tested by calling it.

What it holds:
- members: the processes that have said hello, whether their connection is open, and when they were last heard;
- lost: members that are gone for good. A lost member never comes back: its next hello is refused. That is the fence;
- scopes: which member has which rank in a world or group. When all ranks have joined, all get the roster;
- values: texts that members set and others wait for. A value dies with its owner, or with its scope;
- generations: the sets of members of worlds that may lose and gain members (`generations`);
- notices: that a member has left a scope, closed or aborted a channel (which is a scope inside a scope), or fled from
  the failure of another. All members get every notice. When all members of a scope have left, the scope is forgotten,
  with the values and notices in it.

A member sends all its messages over one connection, and the outbox keeps their order. So who hears that a member is
lost has heard everything that this member announced before.

Everything but `lost` belongs to some member, which sends it again when it connects to a new coordinator. In its hello
every member sends whom it knows, present and lost: so a new coordinator also notices members that ended while there was
none. A coordinator can be killed and replaced.

When a member is lost is decided in `liveness`. A coordinator that was itself stopped must not take its own absence for
the silence of others: a `tick` that comes late moves all times on by as much.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import tutti
from tutti.coordination.description import MemberDescription, ProcessState, process_state
from tutti.coordination.diagnosis import HeldUp, deadlock_text, deadlocked, diagnose
from tutti.coordination.elastic_world import Members
from tutti.coordination.frames import Message, ProtocolError
from tutti.coordination.generations import GenerationTable
from tutti.coordination.knowledge import LEFT, is_inside
from tutti.coordination.launchers import LauncherTable
from tutti.coordination.liveness import MemberRecord, MemberWatch, note_seen
from tutti.coordination.notices import TERMINAL, NoticeTable
from tutti.coordination.scopes import ScopeTable
from tutti.coordination.values import ValueTable

_LATE_TICK_S = 1.0
"""A tick that comes later than this after the one before shows that the coordinator itself was stopped."""
_DIAGNOSIS_S = 0.25
"""How often it is looked for who waits for whom."""
_STACK_S = 3.0
"""A rank that others have waited for as long is asked for its stack, no more often than this."""
_MOST_MEMBERS = 5_000
"""Members and losses that are remembered. All of them are in a message, so their number bounds its length."""
_LONGEST_REASON = 150
"""Characters of a reason that another member gives for a loss."""
_LONGEST_ID = 32
_MOST_OVER = 100
_MOST_CLAIMS = 100
"""Members that are remembered to have said that another one is lost which is here."""


class Refused(Exception):
    """A member that may not take part, with the reason."""


Handler = Callable[[MemberRecord, Message, float], None]


class CoordinatorState:
    """Members, scopes, values and notices of one job."""

    def __init__(
        self,
        patience_s: float,
        host_id: str,
        now: float,
        look: Callable[[int, int], ProcessState] = process_state,
    ) -> None:
        """Start with nobody.

        Args:
            patience_s: a member that is silent for this long is evicted.
            host_id: the coordinator's own host, whose processes it can see.
            look: returns the state of a process of this host, by process id and start time.
        """
        self.outbox: list[tuple[str, Message]] = []
        """Messages to deliver, each with the id of the member that gets it."""
        self.members: dict[str, MemberRecord] = {}
        self.lost: dict[str, str] = {}
        """Members that are gone for good, and why."""
        self.evicted: deque[tuple[MemberDescription, str]] = deque()
        """Members that were lost while their processes may still be there, and why, for a launcher to end them."""
        self._claims: dict[str, set[str]] = {}
        """Members that are here and that others have said to be lost, and these."""
        self._patience_s, self._host_id = patience_s, host_id
        self._watch = MemberWatch(
            patience_s, host_id, look, lambda colleague, **fields: self._send(colleague, op="look", **fields)
        )
        self._ticked_at = self._diagnosed_at = now
        self.held_up: tuple[HeldUp, ...] = ()
        """Ranks that others wait for, as of the last diagnosis."""
        self._suspects: set[int] = set()
        """Ranks that the last diagnosis has found."""
        self._lost_ranks: dict[int, str] = {}
        """Ranks whose processes were lost, and why."""
        self._scopes = ScopeTable(self.members, lambda member, message: self.outbox.append((member, message)))
        self._over: deque[str] = deque(maxlen=_MOST_OVER)
        """Scopes that were forgotten last. A member may still close a channel of one after it has left it."""
        self._values = ValueTable(
            lambda member, request, values: self.outbox.append(
                (member, {"op": "values", "request": request, "values": values})
            )
        )
        self._notices = NoticeTable()
        self.generations = GenerationTable(
            Members(
                is_there=self.members.__contains__,
                describe=lambda member: self.members[member].description.to_json(),
                claims=lambda member: self._claims.get(member, set()),
                send=lambda member, message: self.outbox.append((member, message)),
                meet=self._meet,
            ),
            patience_s,
            now,
        )
        self.launchers = LauncherTable(lambda member, message: self.outbox.append((member, message)))
        self._handlers = _handlers(self)

    def connect(self, hello: Message, now: float) -> MemberRecord:
        """A process has proved that it knows the secret, and says who it is. Raises `Refused`."""
        if hello["version"] != tutti.__version__:
            raise Refused(
                f"it runs Tutti {hello['version']}, and the coordinator of this job runs {tutti.__version__}: install "
                "the same version on every host"
            )
        description = MemberDescription.from_json(hello["member"])
        self._learn(hello, now)
        if (reason := self.lost.get(description.id)) is not None:
            raise Refused(f"the job goes on without it: {reason}")
        record = self.members.get(description.id)
        if record is None:
            if self._is_full:
                raise Refused(f"the job has {_MOST_MEMBERS} members and losses already")
            record = self.members[description.id] = MemberRecord(description, now)
        elif record.description != description:
            raise Refused("another process has its identity")
        # Also if the connection before is still open here: it may be broken, and only the member has noticed it yet.
        # The member sends its requests again.
        self._values.cancel(description.id)
        record.heard_at, record.closed_at, record.process = now, None, None
        self._send(record, op="welcome", version=tutti.__version__, lost=self.lost, host_id=self._host_id)
        for scope, member, kind, reason in self._notices:
            self._send(record, op="noticed", scope=scope, member=member, kind=kind, reason=reason)
        return record

    def _learn(self, hello: Message, now: float) -> None:
        """Take over what a member knows of others. What this coordinator has seen itself counts for more."""
        for member, reason in hello["lost"].items():
            if not isinstance(reason, str) or len(member) > _LONGEST_ID:
                raise ProtocolError("a loss is a member and a reason")
            if member in self.members:
                claims = self._claims.setdefault(member, set())
                if len(claims) < _MOST_CLAIMS:
                    claims.add(hello["member"]["id"])
            elif member not in self.lost and not self._is_full:
                self._remember_lost(member, reason[:_LONGEST_REASON])
        for known in map(MemberDescription.from_json, hello["known"]):
            self._expect(known, now)

    def _expect(self, known: MemberDescription, now: float) -> None:
        """Wait for a member that others know and that has not connected to this coordinator, unless it is lost."""
        if known.id not in self.lost and known.id not in self.members and not self._is_full:
            closed_at = now + self._patience_s
            self.members[known.id] = MemberRecord(known, now, closed_at=closed_at, has_met_others=True)

    @property
    def _is_full(self) -> bool:
        return len(self.members) + len(self.lost) >= _MOST_MEMBERS

    def receive(self, member: str, message: Message, now: float) -> None:
        """A member has sent a message. Raises `ProtocolError` for what no member sends."""
        record = self.members.get(member)
        if record is None:
            return  # It was lost a moment ago.
        record.heard_at = now
        handle = self._handlers.get(message["op"])
        if handle is None:
            raise ProtocolError(f"members do not send '{message['op']}'")
        handle(record, message, now)

    def disconnect(self, member: str, now: float) -> None:
        """The connection of a member has ended."""
        if (record := self.members.get(member)) is not None:
            record.closed_at, record.looked_at = now, 0.0
            self._judge(record, now)

    def tick(self, now: float) -> float:
        """Do what is due; return after how many seconds to call again."""
        if (gap := now - self._ticked_at) > _LATE_TICK_S:
            # What members reported is old by as much, and is not judged before they have reported again.
            self._diagnosed_at = now + _LATE_TICK_S
            for record in self.members.values():
                record.heard_at += gap
                if record.closed_at is not None:
                    record.closed_at += gap
        self._ticked_at = now
        for record in list(self.members.values()):
            self._judge(record, now)
        self._diagnose(now)
        self.generations.tick(now)
        self._scopes.tell_missing(now)
        return 0.02 if any(record.closed_at is not None for record in self.members.values()) else 0.25

    def table(self, now: float) -> list[dict[str, Any]]:
        """What is known of every member, by rank."""
        rows = [
            {
                **record.description.to_json(),
                "status": record.status,
                "silent_s": round(now - record.heard_at, 3),
                "connected": record.closed_at is None,
                "process": record.process,
                "stack": record.stack,
            }
            for record in self.members.values()
            if not record.is_observer
        ]
        return sorted(rows, key=lambda row: row["rank"])

    # Messages of members

    def _notice(self, record: MemberRecord, message: Message, _: float) -> None:
        scope, kind, reason = message["scope"], message["kind"], message["reason"]
        if (over := next((each for each in self._over if is_inside(scope, each)), None)) is not None:
            self._send(record, op="forget", scope=over)
            return
        self._notices.add(record.id, scope, kind, reason, (message["size"], message["members"]))
        self._broadcast(op="noticed", scope=scope, member=record.id, kind=kind, reason=reason)
        if kind in TERMINAL:
            self._forget_if_over(scope, message["size"])

    def _forget_if_over(self, scope: str, size: int) -> None:
        """Forget a scope, or a channel in one, when all its members have left it or are lost."""
        participants = self._notices.participants(scope) or self._scopes.members_around(scope)
        over = self._notices.finished(scope) | self.lost.keys() & set(participants)
        if len(over) < size:
            return
        self._values.drop_scope(scope)
        self._notices.drop_scope(scope)
        if self._scopes.drop(scope):
            self._over.append(scope)
        self._broadcast(op="forget", scope=scope)

    def _meet(self, name: str, members: list[dict[str, Any]]) -> None:
        """A generation was formed, here or, as a member says, at the coordinator before this one."""
        for fields in members:
            self._expect(MemberDescription.from_json(fields), self._ticked_at)
            if fields["id"] in self.members:
                self.members[fields["id"]].has_met_others = True
        self._scopes.meet(name, members)

    # Diagnosis

    def _diagnose(self, now: float) -> None:
        """Find who holds others up; end the waits of ranks that wait for each other, which nothing else would end."""
        if now < self._diagnosed_at + _DIAGNOSIS_S:
            return
        self._diagnosed_at, table = now, self.table(now)
        found = diagnose(table, self._lost_ranks)
        # Members report at different moments: one that goes on may look like the cause to another's older report.
        # So a cause counts when it is found twice, between which all have reported.
        self.held_up = tuple(each for each in found if each.rank in self._suspects)
        self._suspects = {each.rank for each in found}
        for each in self.held_up:
            if each.seconds > _STACK_S:
                self._ask_stack(each.rank, now)
        if stuck := deadlocked(table, self._patience_s):
            reason = deadlock_text(stuck)
            for row in stuck:
                self._send(self.members[row["id"]], op="stuck", reason=reason)

    def _ask_stack(self, rank: int, now: float) -> None:
        """Ask a rank for its stack, unless it was asked a moment ago."""
        for record in self.members.values():
            if record.description.rank == rank and now - record.stack_asked_at > _STACK_S:
                record.stack_asked_at = now
                self._send(record, op="send_stack")

    # Liveness

    def _judge(self, record: MemberRecord, now: float) -> None:
        """Lose a member whose process has ended, or that was silent for too long."""
        verdict = self._watch.verdict(record, self.members.values(), now)
        if verdict is not None:
            if verdict.may_run:
                self.evicted.append((record.description, verdict.reason))
            self._lose(record, verdict.reason, now)

    def _lose(self, record: MemberRecord, reason: str, now: float) -> None:
        """Go on without a member, for good."""
        member = record.id
        del self.members[member]
        self._claims.pop(member, None)
        self._values.drop_member(member)
        # To itself too, if it is connected: it then knows that it was evicted, and why. One that left may end now.
        self.outbox.append((member, {"op": "refused", "reason": f"the job goes on without it: {reason}"}))
        self.generations.replaces.pop(member, None)
        if record.is_observer:
            return
        if not record.has_met_others:
            # Nobody knows it, so nobody has to be told. Were such ones remembered, they could fill the memory.
            self._notices.drop_member(member)
            self.generations.lost(member, now)
            return
        self._lost_ranks[record.description.rank] = reason
        self._scopes.lost(member)
        self._remember_lost(member, reason)
        for name, num_ranks in self._scopes.of(member):
            self._forget_if_over(name, num_ranks)
        for name in self._notices.scopes():  # Channels that the others have closed already.
            if (known := self._notices.size(name)) is not None:
                self._forget_if_over(name, known)
        # Last: members hear of the loss before they hear of the next generation.
        self.generations.lost(member, now)

    def _remember_lost(self, member: str, reason: str) -> None:
        self.lost[member] = reason
        self._broadcast(op="lost", member=member, reason=reason)

    # Sending

    def _send(self, record: MemberRecord, **message: Any) -> None:
        self.outbox.append((record.id, message))

    def _broadcast(self, **message: Any) -> None:
        self.outbox.extend((member, message) for member in self.members)

    def drain(self) -> Iterable[tuple[str, Message]]:
        """Take all messages out of the outbox."""
        messages, self.outbox = self.outbox, []
        return messages


def _by_id(handle: Callable[[str, Message, float], None]) -> Callable[[MemberRecord, Message, float], None]:
    return lambda record, message, now: handle(record.id, message, now)


def _handlers(state: "CoordinatorState") -> dict[str, Handler]:
    """Return what is done with each kind of message of members."""
    return {
        "join": state._scopes.join,
        "set": lambda record, message, _: state._values.set(record.id, message["key"], message["value"]),
        "get": lambda record, message, _: state._values.request(record.id, message["request"], message["keys"]),
        "cancel": lambda record, message, _: state._values.cancel(record.id, message["request"]),
        "propose": lambda record, message, _: state._values.propose(record.id, message["key"], message["value"]),
        "notice": state._notice,
        "beat": lambda record, message, _: record.reported(message["status"]),
        "sync": lambda record, message, _: state._send(record, op="synced", request=message["request"]),
        "seen": lambda _, message, now: note_seen(state.members.get(message["member"]), message["state"]),
        "query": lambda record, message, now: state._send(
            record, op="table", request=message["request"], members=state.table(now)
        ),
        "ask_stack": lambda _, message, now: state._ask_stack(message["rank"], now),
        "stack": lambda record, message, _: setattr(record, "stack", message["text"]),
        "bye": lambda record, _, now: state._lose(record, LEFT, now),
        **{op: _by_id(handle) for op, handle in state.generations.handlers.items()},
        "numbers": lambda record, message, now: state.launchers.numbers(record.id, message, len(state.table(now))),
        "manage": lambda record, message, _: state.launchers.manage(record.id, message),
    }
