"""`ElasticWorld`: what the coordinator knows of one elastic world: its present generation, and what its members say.

It decides nothing: `elastic_decisions` does.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

from tutti.coordination.frames import Message


@dataclass(frozen=True)
class Members:
    """The members of the job, as the coordinator knows them."""

    is_there: Callable[[str], bool]
    """Whether a member is neither lost nor unknown."""
    describe: Callable[[str], dict[str, Any]]
    """Returns the description of a member that is there."""
    claims: Callable[[str], Set[str]]
    """Returns the members that said, when they connected, that one which is there was lost."""
    send: Callable[[str, Message], None]
    """Sends a message to a member, if it is connected."""
    meet: Callable[[str, list[dict[str, Any]]], None]
    """Called with the scope and the descriptions of the members of a generation, by rank."""


@dataclass(frozen=True)
class MemberRequest:
    """What a member says when it asks for the next generation."""

    after: int
    """The generation that it was in; -1 if it is new."""
    ready: bool
    info: dict[str, Any]
    at: float = 0.0
    """When it has said so."""


@dataclass(eq=False)
class ElasticWorld:
    """One elastic world, at its coordinator."""

    scope: str
    minimum: int
    maximum: int
    expected: int
    """Number of members that the launcher has started."""
    there: Members
    number: int = -1
    """Number of the present generation; -1 before the first, and while nobody has described it."""
    members: list[str] = field(default_factory=list)
    """Ids of its members, by rank."""
    announcement: Message = field(default_factory=dict)
    """The message that told its members about it."""
    highest: int = -1
    """The largest number of a generation that was heard of."""
    belonging: dict[str, int] = field(default_factory=dict)
    """The generation that each member is in, as it says itself."""
    departed: set[str] = field(default_factory=set)
    """Members that have ended their part for good."""
    is_finished: bool = False
    """Whether one of them has come to the end of the training."""
    requests: dict[str, MemberRequest] = field(default_factory=dict)
    """In the order in which they came."""
    asked_at: float = 0.0
    """When the last of them came."""
    wants: dict[str, int] = field(default_factory=dict)
    """The generation that each member wants to end."""
    boundaries: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of each member: a generation, and the number of its steps after which it can stop."""
    switch: int | None = None
    """The number of steps after which all stop, once that is known."""
    all_lost: bool = False
    """Whether all its members were lost, so that it begins anew."""
    released: set[str] = field(default_factory=set)
    """Members that were let go, as they wanted."""
    announced: set[str] = field(default_factory=set)
    """New members that were told that the world has begun, and have yet to ask again."""
    told: set[tuple[str, str]] = field(default_factory=set)
    """Members and the kinds of messages that they were sent in this generation, over their present connections."""

    # What members say

    def enter(self, member: str, request: MemberRequest, now: float) -> None:
        """A member asks for the next generation."""
        if member in self.departed:
            self.refuse(member, "it has ended its part in the training")
            return
        if member in self.released:
            self.there.send(member, {"op": "released", "scope": self.scope, "number": request.after})
            return
        self._connected(member)
        self._heard_of(member, request.after)
        self.requests[member], self.asked_at = request, now

    def belongs(self, member: str, number: int) -> None:
        """A member is in a generation, and does not ask for the next one."""
        self._connected(member)
        self._heard_of(member, number)
        if member in self.requests and self.requests[member].after < number:
            del self.requests[member]

    def depart(self, member: str, finished: bool) -> None:
        """A member has ended its part for good."""
        self.departed.add(member)
        self.is_finished |= finished
        self._forget(member)

    def lost(self, member: str) -> None:
        """A member is lost."""
        self._forget(member)
        if member not in self.members:
            self.departed.discard(member)

    def has_asked(self, member: str, op: str) -> bool:
        """Return whether a member was sent a message of a kind, in this generation."""
        return (member, op) in self.told

    def refuse(self, member: str, reason: str) -> None:
        """Tell a member that there is no place for it."""
        self.requests.pop(member, None)
        self.there.send(member, {"op": "conflict", "scope": self.scope, "reason": reason})

    @property
    def has_begun(self) -> bool:
        """Whether there is a generation, which some member is in or was."""
        return not self.all_lost and (self.number >= 0 or bool(self.belonging))

    def release(self, member: str) -> None:
        """Let a member go that wants to leave."""
        self.members.remove(member)
        self._forget(member)
        self.released.add(member)
        self.there.send(member, {"op": "released", "scope": self.scope, "number": self.number})

    @property
    def is_over(self) -> bool:
        """Whether no member takes part or wants to."""
        return not self.requests and not self.belonging and not self.living()

    def _connected(self, member: str) -> None:
        """A member may have connected anew, and missed what it was sent."""
        self.told -= {(member, op) for op in ("change", "switch", "recall")}

    def _heard_of(self, member: str, number: int) -> None:
        if number >= 0:
            self.belonging[member] = number
            self.highest = max(self.highest, number)

    def _forget(self, member: str) -> None:
        by_member: tuple[dict[str, Any], ...] = (self.requests, self.belonging, self.wants, self.boundaries)
        for kept in by_member:
            kept.pop(member, None)
        self.announced.discard(member)
        self._connected(member)

    def present(self, announcement: Message, members: list[str]) -> None:
        """Make a generation the present one."""
        self.number, self.members, self.announcement = announcement["number"], members, announcement
        self.highest = max(self.highest, self.number)
        self.departed = {member for member in self.departed if self.there.is_there(member)}
        self.switch, self.all_lost = None, False
        self.told.clear()

    def tell(self, member: str, op: str, **fields: int) -> None:
        """Send a message of this generation once over each connection."""
        if (member, op) not in self.told:
            self.told.add((member, op))
            self.there.send(member, {"op": op, "scope": self.scope, **fields})

    def living(self) -> list[str]:
        """Return the members of the present generation that still take part, by rank."""
        return [each for each in self.members if each not in self.departed and not self.is_lost(each)]

    def is_lost(self, member: str) -> bool:
        """Return whether a member of the present generation is lost, to this coordinator or to others of them."""
        if not self.there.is_there(member):
            return True
        # A coordinator before this one has evicted it, and it was the first to connect to this one.
        claims = self.there.claims(member)
        return bool(claims) and any(each in self.members and self.there.is_there(each) for each in claims)

    def newcomers(self) -> list[str]:
        """Return new members that wait, the first one first."""
        return [each for each, request in self.requests.items() if request.after < 0 and request.ready]

    def boundary(self, member: str) -> int | None:
        """Return after how many steps of the present generation a member can stop; None if it has not said so."""
        number, steps = self.boundaries.get(member, (-1, 0))
        return steps if number == self.number else None
