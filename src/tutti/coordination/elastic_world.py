"""`ElasticWorld`: the present generation of one elastic world, and the decision when the next one is formed.

How it works
------------
What members say is kept by `enter`, `belongs`, `depart`, `lost` and so on, and decides nothing. `advance` looks at all
of it and does what is due; it is called after everything that happens, and does nothing if nothing is due. So the
order in which messages come does not matter, nor whether they come from a coordinator's whole life or all at once
after a restart.

*Begin.* The first generation is formed when all have asked that the launcher has started, or when the minimum has
and nobody else came for `_SETTLE_S`. Only members that do not know of a generation yet begin a world: those that are
`ready` were told that it runs. Fewer than the minimum wait until they give up (`tutti.init(timeout=...)`).

*Next.* A later one is formed when all living members of the present one have asked. With fewer members than the
minimum it waits as long as a launcher says that more workers come, and for `_TOO_FEW_S`, in which launchers notice
losses. After that it is formed with `too_few`, so that its members save their state and end. Members that want to leave
are released before, if others stay. When no member is left, those that wait to come in are refused. If none of the
lost ones had come to the end, the world begins anew with those that come then: nobody has the state any more.

*Change without an interruption.* Members change generations at different moments after a loss: each as soon as it
notices. Where a new member waits or one wants to leave, and after a loss that the strategy tolerates, nothing would end
the steps under way. So all are sent *change*; each answers with the number of steps after which it can stop
(`boundary`), and when all have, they get the largest of these (*switch*).

*Connections that break.* A message to a member that is not connected is dropped. A member that connects says at once
what it waits for (`enter`) or where it is (`belongs`), and then gets what it may have missed: the generation that was
formed without a connection to it, and questions of this generation (`_tell`).

*A new coordinator* knows nothing. Each member says the number of its generation, and the one with the largest is asked
(*recall*) to describe that generation; if it is lost before it has, the next one is asked. Members of it that nobody
has seen count as living until they connect or are found lost. One that another of them says to be lost does not count:
it was evicted, and must not come back because it is the first to connect. A generation that was formed and is known to
none of the living was begun by none of them, so they go on from the one before. After the generation that was described
only the next one can have been formed, because a third would need all living members in it: its number is left out.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

from tutti.coordination.frames import Message, ProtocolError, encode

_SETTLE_S = 1.0
"""How long the first generation waits for more members after the last one that came, once it has the minimum."""
_TOO_FEW_S = 2.0
"""How long a generation with too few members waits, after the last one that asked, for launchers to notice losses."""
TRAINING_HAS_ENDED = "the training has ended"
"""The reason that a new member gets which comes too late."""
WORKERS_ARE_LOST = "all workers that this one was to join are lost"
"""The reason that a new member gets which has waited for members that are all lost."""
_RECONNECT_S = 3.0
"""How old a coordinator must be before it takes a few new members for a whole world: were it started anew, members of
the world before would have connected by then."""


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
    is_lost: bool = False
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

    def adopt(self, announcement: Message) -> None:
        """A member has described the present generation, which a coordinator before this one has formed."""
        described = [each["member"] for each in announcement["members"]]
        fields = {name: announcement[name] for name in ("scope", "number", "members", "too_few")}
        self._present({"op": "generation", **fields}, [each["id"] for each in described])
        # The next one may have been formed, and be known to new members only: its number is not used again.
        self.highest = max(self.highest, self.number + 1)
        self.there.meet(f"{self.scope}.{self.number}", described)

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
        return not self.is_lost and (self.number >= 0 or bool(self.belonging))

    @property
    def is_over(self) -> bool:
        """Whether no member takes part or wants to."""
        return not self.requests and not self.belonging and not self._living()

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

    # What is done

    def begin(self, now: float, started: float, patience_s: float) -> None:
        """Form the first generation, if enough members have come.

        Args:
            started: when the coordinator was started.
        """
        come = [member for member, request in self.requests.items() if not request.ready]
        settled = now - self.asked_at >= _SETTLE_S and now - started >= _RECONNECT_S
        ranks = {member: int(self.there.describe(member)["rank"]) for member in come}
        # Who was started later has another number, unless one of these is lost.
        started_first = {rank for rank in ranks.values() if rank < self.expected}
        enough = max(self.minimum, min(self.expected, self.maximum))
        if len(started_first) >= enough or (settled and len(come) >= self.minimum):
            self._form(sorted(come[: self.maximum], key=ranks.__getitem__), too_few=False)
        elif now - max(self.asked_at, started) >= patience_s:
            # They were told by a coordinator before this one that the world runs, and nobody of it has come.
            for member in self._newcomers():
                self.refuse(member, "no worker of the training is left")

    def advance(self, more_come: bool, now: float) -> None:
        """Do what is due in a world that has begun.

        Args:
            more_come: whether a launcher has started more workers, or is about to.
        """
        if self._recalls():
            return
        self._refuse_strangers()
        living = self._living()
        if not living:
            self._end_world()
            return
        self._refuse_doubters(living)
        self._answer_requests(len(living))
        if all(member in self.requests for member in living):
            chosen = [*self._release(living), *self._newcomers()]
            too_few = len(chosen) < self.minimum and not self.is_finished
            if not too_few or not (more_come or now - self.asked_at < _TOO_FEW_S):
                self._form(chosen, too_few)
        elif self._should_end(living):
            self._end(living)

    def _end_world(self) -> None:
        """All members have ended: nobody is there to whom new ones could come."""
        is_over = self.is_finished or any(member in self.departed for member in self.members)
        for member in {*self.requests, *self.announced}:
            self.refuse(member, TRAINING_HAS_ENDED if is_over else WORKERS_ARE_LOST)
        self.announced.clear()
        self.is_lost = not is_over

    def _release(self, living: list[str]) -> list[str]:
        """Let members go that want to leave, if others stay; return the members of the next generation."""
        staying = [member for member in living if not self.requests[member].info.get("leaving")]
        if not staying:
            return living  # Nobody else has the state.
        for member in living:
            if member not in staying:
                self.members.remove(member)
                self._forget(member)
                self.released.add(member)
                self.there.send(member, {"op": "released", "scope": self.scope, "number": self.number})
        return staying

    def _recalls(self) -> bool:
        """Have a generation described that members are in and this coordinator does not know; False if there is none.

        Ended by the answer, or by the loss of all members that could give it.
        """
        newer = [each for each, number in self.belonging.items() if number > self.number and self.there.is_there(each)]
        if newer:
            member = max(newer, key=lambda each: self.belonging[each])
            self._tell(member, "recall", number=self.belonging[member])
        return bool(newer)

    def _refuse_strangers(self) -> None:
        """Tell members of earlier generations that are not in the present one."""
        for member, number in list(self.belonging.items()):
            if member not in self.members and number <= self.number:
                del self.belonging[member]
                self.refuse(member, "the others have gone on without it")

    def _refuse_doubters(self, living: list[str]) -> None:
        """Refuse new members to which a living one is lost, as a coordinator before this one has told them."""
        doubters = {each for member in living for each in self.there.claims(member)}
        for member in doubters & set(self._newcomers()):
            self.refuse(member, "it has heard that a worker is lost, and that one is here")

    def _answer_requests(self, num_living: int) -> None:
        """Answer members that have missed something, and those for which there is no place."""
        for member, request in list(self.requests.items()):
            if member in self.members and request.after < self.number:
                # It was formed while the connection of this member was broken.
                del self.requests[member]
                self.there.send(member, self.announcement)
            elif request.after < 0 and self.is_finished:
                self.refuse(member, TRAINING_HAS_ENDED)
            elif not request.ready and request.after < 0:
                del self.requests[member]
                self.announced.add(member)
                self.there.send(member, {"op": "running", "scope": self.scope, "size": len(self.members)})
        for member in self._newcomers()[max(0, self.maximum - num_living) :]:
            self.refuse(member, f"the job has {self.maximum} workers, which is its maximum")

    def _should_end(self, living: list[str]) -> bool:
        """Return whether the present generation should end, although nothing ends it by itself."""
        return (
            bool(self._newcomers())
            or any(self.wants.get(member) == self.number for member in living)
            or any(self._boundary(member) is not None for member in living)  # Somebody was asked, and waits.
            # Strategies that go on without lost ranks end the generation where all can stop.
            or any(member not in self.departed and self._is_lost(member) for member in self.members)
        )

    def _end(self, living: list[str]) -> None:
        """Ask all where they can stop; tell them, once all have answered."""
        boundaries = [self._boundary(member) for member in living]
        for member, boundary in zip(living, boundaries, strict=True):
            if boundary is None:
                self._tell(member, "change", number=self.number)
        if self.switch is None and None not in boundaries:
            self.switch = max(boundary for boundary in boundaries if boundary is not None)
        if self.switch is not None:
            for member in living:
                self._tell(member, "switch", number=self.number, steps=self.switch)

    def _form(self, chosen: list[str], too_few: bool) -> None:
        requests = {member: self.requests[member] for member in chosen}
        described = [self.there.describe(each) for each in chosen]
        members = [
            {"member": description, "after": requests[each].after, "info": requests[each].info}
            for each, description in zip(chosen, described, strict=True)
        ]
        number = max(self.number, self.highest) + 1
        fields = {"scope": self.scope, "number": number, "members": members, "too_few": int(too_few)}
        announcement = {"op": "generation", **fields}
        try:
            encode(announcement)
        except ProtocolError:  # It can be sent to nobody. They end, and do not ask the same again without end.
            for member in chosen:
                self.refuse(member, f"the values of {len(chosen)} workers are too long for one message")
            return
        for member in chosen:
            del self.requests[member]
            self.announced.discard(member)
        self._present(announcement, chosen)
        self.there.meet(f"{self.scope}.{number}", described)
        for member in chosen:
            self.there.send(member, announcement)
        self._answer_requests(len(chosen))

    def _present(self, announcement: Message, members: list[str]) -> None:
        """Make a generation the present one."""
        self.number, self.members, self.announcement = announcement["number"], members, announcement
        self.highest = max(self.highest, self.number)
        self.departed = {member for member in self.departed if self.there.is_there(member)}
        self.switch, self.is_lost = None, False
        self.told.clear()

    def _tell(self, member: str, op: str, **fields: int) -> None:
        """Send a message of this generation once over each connection."""
        if (member, op) not in self.told:
            self.told.add((member, op))
            self.there.send(member, {"op": op, "scope": self.scope, **fields})

    def _living(self) -> list[str]:
        """Return the members of the present generation that still take part, by rank."""
        return [each for each in self.members if each not in self.departed and not self._is_lost(each)]

    def _is_lost(self, member: str) -> bool:
        """Return whether a member of the present generation is lost, to this coordinator or to others of them."""
        if not self.there.is_there(member):
            return True
        # A coordinator before this one has evicted it, and it was the first to connect to this one.
        claims = self.there.claims(member)
        return bool(claims) and any(each in self.members and self.there.is_there(each) for each in claims)

    def _newcomers(self) -> list[str]:
        """Return new members that wait, the first one first."""
        return [each for each, request in self.requests.items() if request.after < 0 and request.ready]

    def _boundary(self, member: str) -> int | None:
        """Return after how many steps of the present generation a member can stop; None if it has not said so."""
        number, steps = self.boundaries.get(member, (-1, 0))
        return steps if number == self.number else None
