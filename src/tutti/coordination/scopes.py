"""Scopes: which member has which rank in a world, group or generation, as the coordinator keeps it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tutti.coordination.frames import Message, ProtocolError
from tutti.coordination.knowledge import is_inside
from tutti.coordination.liveness import MemberRecord

_MOST_RANKS = 1 << 16
"""The largest scope."""
_MOST_SCOPES = 20_000
_MISSING_S = 2.0
"""How often those that wait for others to join are told who is missing."""


@dataclass(eq=False)
class _Scope:
    """Members that meet, each with a rank."""

    size: int
    since: float
    told_at: float
    """When those that have joined were last told who is missing."""
    told: list[int] = field(default_factory=list)
    members: dict[int, str] = field(default_factory=dict)
    """Ids of members by rank."""
    descriptions: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Descriptions by id. Kept of lost members too: one that missed the roster has to learn who they were."""

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.members]

    def roster(self) -> list[dict[str, Any]]:
        """Describe the members by rank."""
        return [self.descriptions[self.members[rank]] for rank in range(self.size)]


class ScopeTable:
    """The scopes of a job."""

    def __init__(self, members: Mapping[str, MemberRecord], send: Callable[[str, Message], None]) -> None:
        """Start without any.

        Args:
            members: those that are there, by id.
            send: sends a message to one of them.
        """
        self._members, self._send = members, send
        self._scopes: dict[str, _Scope] = {}

    def __len__(self) -> int:
        return len(self._scopes)

    def join(self, record: MemberRecord, message: Message, now: float) -> None:
        """A member says which rank it has in a scope. When all ranks have joined, all get the roster."""
        name, rank, size = message["scope"], message["rank"], message["size"]
        if not 0 < size <= _MOST_RANKS:
            raise ProtocolError(f"a scope has 1 to {_MOST_RANKS} ranks")
        if name not in self._scopes and len(self._scopes) >= _MOST_SCOPES:
            raise ProtocolError(f"there are {_MOST_SCOPES} scopes already")
        record.has_met_others = True
        scope = self._scopes.setdefault(name, _Scope(size, now, now))
        holder = scope.members.get(rank, record.id)
        if not 0 <= rank < scope.size or size != scope.size:
            reason = f"rank {rank} of {size} does not fit into a world of {scope.size}"
        elif holder != record.id:
            other = self._members[holder].name if holder in self._members else "a lost process"
            reason = f"two processes say they are rank {rank} of {size}: {other} and {record.name}; each needs its own"
        else:
            complete_before = not scope.missing
            scope.members[rank] = record.id
            scope.descriptions[record.id] = record.description.to_json()
            if not scope.missing:
                # To all when it becomes complete, and to one that joins again after its connection broke.
                for member in [record.id] if complete_before else scope.members.values():
                    if member in self._members:
                        self._send(member, {"op": "roster", "scope": name, "members": scope.roster()})
            return
        self._send(record.id, {"op": "conflict", "scope": name, "reason": reason})

    def meet(self, name: str, members: list[dict[str, Any]]) -> None:
        """A scope is complete from the start: the descriptions of its members, by rank, are known."""
        if len(self._scopes) < _MOST_SCOPES:
            scope = self._scopes[name] = _Scope(len(members), 0.0, 0.0)
            scope.members = {rank: fields["id"] for rank, fields in enumerate(members)}
            scope.descriptions = {fields["id"]: fields for fields in members}

    def tell_missing(self, now: float) -> None:
        """Tell those that wait who is missing."""
        for name, scope in self._scopes.items():
            missing = scope.missing[:100]
            if missing and (now - scope.told_at >= _MISSING_S or missing != scope.told):
                # The time says how long they are waited for, at the interval at which people want to read it.
                due = now - scope.told_at >= _MISSING_S
                scope.told, scope.told_at = missing, now if due else scope.told_at
                seconds = scope.told_at - scope.since
                for member in scope.members.values():
                    if member in self._members:
                        self._send(member, {"op": "missing", "scope": name, "ranks": missing, "seconds": seconds})

    def lost(self, member: str) -> None:
        """A member is lost. It may be started again, before a scope is complete."""
        for scope in self._scopes.values():
            if scope.missing:
                scope.members = {rank: holder for rank, holder in scope.members.items() if holder != member}

    def of(self, member: str) -> list[tuple[str, int]]:
        """Return the names and sizes of the scopes that a member is in."""
        return [(name, scope.size) for name, scope in self._scopes.items() if member in scope.members.values()]

    def members_around(self, name: str) -> Iterable[str]:
        """Return all members of the world that a scope is, or is in."""
        world = max((each for each in self._scopes if is_inside(name, each)), key=len, default=None)
        return () if world is None else self._scopes[world].members.values()

    def drop(self, name: str) -> bool:
        """Forget a scope; return whether there was one."""
        return self._scopes.pop(name, None) is not None
