"""Generations: the numbered, agreed sets of members of a world that may lose and gain members.

How it works
------------
An elastic world goes through generations 0, 1, 2, ... Each is a list of members, of which the n-th has rank n. Once it
is formed it never changes. `GenerationTable` decides for all worlds of a job; members only ask.

- *enter*: a member has ended its part in its generation, or is new, and asks for the next one. The next one is formed
  when all living members of the present one have asked. So nobody waits for a lost member, and nobody is in two
  generations. Those that were there keep their order; new ones follow in the order in which they came, up to the
  maximum. Each enters with a few values of its own, which all get.
- A new member asks twice: first whether the world has begun (`ready` is False where its answer may be "running"), and
  again when it has built its model. Only then do the others stop for it.
- *depart*: a member has ended its training. Nobody waits for it any more.
- *leave*: a member that enters with "leaving" among its values is not in the next generation, if others stay. It is
  *released* as soon as all have asked. If all want to leave, they go on together once more, and so can save the state.

The first generation is formed when as many have asked as the launcher has started, or when the minimum has and nobody
else came for `_SETTLE_S`. A later one with fewer members than the minimum waits as long as a launcher says that more
workers come (`replaces`), and for `_TOO_FEW_S`, in which launchers notice losses. After that it is formed with
`too_few`, so that its members save their state and end.

If all members of a generation are lost, nobody has the state any more, and the world begins anew with those that come.
If one of them had ended by itself, the training is over, and those that come are told so.

Members change generations at different moments after a loss: each as soon as it notices. Where nobody is lost, and a
new member waits or one wants to leave, nothing would end the steps under way. So the table sends *change*, each member
answers with the number of steps after which it can stop (`boundary`), and all get the largest of these (*switch*).

A coordinator that is started anew learns the present generation from its members (`belongs`), which then ask again. It
forms the next one only when all members of the present one have connected or are lost.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tutti.coordination.frames import Message, ProtocolError

_SETTLE_S = 1.0
"""How long the first generation waits for more members after the last one that came, once it has the minimum."""
_TOO_FEW_S = 2.0
"""How long a generation with too few members waits, after the last one that asked, for launchers to notice losses."""
TRAINING_HAS_ENDED = "the training has ended"
"""The reason that a new member gets which comes too late."""
WORKERS_ARE_LOST = "all workers that this one was to join are lost"
"""The reason that a new member gets which has waited for members that are all lost."""
_MOST_WORLDS = 100
_MOST_MEMBERS = 5_000
_MOST_STEPS = 1 << 62


@dataclass(frozen=True)
class _Entry:
    """A member that asks for the next generation."""

    after: int
    """The generation that it was in; -1 if it is new."""
    ready: bool
    info: dict[str, Any]


@dataclass(eq=False)
class _World:
    """The present generation of one world, and what its members ask for."""

    minimum: int
    maximum: int
    expected: int
    """Number of members that the launcher has started."""
    number: int = -1
    """Number of the last generation; -1 before the first."""
    has_begun: bool = False
    """Whether there is a generation now. Not before the first, and not after the loss of all members."""
    members: list[str] = field(default_factory=list)
    """Ids of its members, by rank."""
    announcement: Message = field(default_factory=dict)
    """The message that told its members about it."""
    departed: set[str] = field(default_factory=set)
    """Those of them that have ended their part for good."""
    is_finished: bool = False
    """Whether one of them has come to the end of the training."""
    requests: dict[str, _Entry] = field(default_factory=dict)
    """In the order in which they came."""
    asked_at: float = 0.0
    """When the last of them came."""
    is_changing: bool = False
    """Whether members were asked where they can stop."""
    boundaries: dict[str, int] = field(default_factory=dict)
    """Their answers."""
    is_switching: bool = False
    """Whether they were told where to stop."""

    released: set[str] = field(default_factory=set)
    """Members that were let go."""
    announced: set[str] = field(default_factory=set)
    """New members that were told that the world has begun, and have yet to ask again."""

    def newcomers(self) -> list[str]:
        """New members that wait, the first one first."""
        return [member for member, request in self.requests.items() if request.after < 0 and request.ready]


class GenerationTable:
    """The elastic worlds of a job."""

    def __init__(
        self,
        send: Callable[[str, Message], None],
        describe: Callable[[str], dict[str, Any] | None],
        meet: Callable[[str, list[str]], None],
    ) -> None:
        """Start without any.

        Args:
            send: sends a message to a member.
            describe: returns a member's description; None if it is lost.
            meet: called with the scope and the members of each generation.
        """
        self._send, self._describe, self._meet = send, describe, meet
        self._worlds: dict[str, _World] = {}
        self.replaces: dict[str, bool] = {}
        """Whether workers come that a launcher has started or is about to start, by launcher."""

    def enter(self, member: str, message: Message, now: float) -> None:
        """A member asks for the generation after its own."""
        world = self._world(message)
        after = message["after"]
        if member in world.released:
            self._send(member, {"op": "released", "scope": message["scope"], "number": after})
            return
        if member in world.members and after < world.number:
            # It was formed while the connection of this member was broken.
            if world.announcement:
                self._send(member, world.announcement)
            return
        if after > world.number:
            raise ProtocolError("a member of a generation that has not been")
        if after >= 0 and member not in world.members:
            raise ProtocolError("a generation that this member is not in")
        if after < 0 and world.has_begun and not self._admit(message, world, member):
            return
        world.requests[member] = _Entry(after, bool(message["ready"]), message["info"])
        world.asked_at = now
        self._advance(message["scope"], world, now)

    def _admit(self, message: Message, world: _World, member: str) -> bool:
        """Whether a new member may ask for the next generation of a world that has begun; otherwise it is told why."""
        scope, living = message["scope"], self._living(world)
        refusal = ""
        if world.is_finished or not living:
            refusal = TRAINING_HAS_ENDED
        elif len({*living, *world.newcomers()} - {member}) >= world.maximum:
            refusal = f"the job has {world.maximum} workers, which is its maximum"
        if refusal:
            self._send(member, {"op": "conflict", "scope": scope, "reason": refusal})
        elif message["ready"]:
            world.announced.discard(member)
            return True
        else:
            world.announced.add(member)
            self._send(member, {"op": "running", "scope": scope, "size": len(living)})
        return False

    def belongs(self, member: str, message: Message) -> None:
        """A member says which generation it is in: to a coordinator that was started after it was formed."""
        world = self._world(message)
        if message["number"] > world.number:
            world.number, world.members = message["number"], list(message["members"])
            world.has_begun = True
            world.departed.clear()

    def depart(self, member: str, message: Message, now: float) -> None:
        """A member has ended its part in a world for good."""
        if (world := self._worlds.get(message["scope"])) is not None:
            world.departed.add(member)
            world.is_finished |= bool(message["finished"])
            self._gone(message["scope"], world, member, now)

    def want(self, member: str, message: Message) -> None:
        """A member wants to leave, or knows another reason why the generation should end."""
        world = self._worlds.get(message["scope"])
        if world is not None and message["number"] == world.number and member in world.members:
            self._ask_for_boundaries(message["scope"], world)

    def boundary(self, member: str, message: Message) -> None:
        """A member says after how many steps it can stop."""
        world = self._worlds.get(message["scope"])
        if world is None or message["number"] != world.number or member not in world.members:
            return  # It was sent before the generation ended.
        if not 0 <= message["steps"] < _MOST_STEPS:
            raise ProtocolError("a number of steps that nobody takes")
        world.boundaries[member] = message["steps"]
        self._try_switch(message["scope"], world)

    def lost(self, member: str, now: float) -> None:
        """A member is lost, or has ended."""
        for scope, world in list(self._worlds.items()):
            if member in world.members and member not in world.departed:
                # Strategies that go on without lost ranks end the generation where all can stop.
                self._ask_for_boundaries(scope, world)
            self._gone(scope, world, member, now)

    def _gone(self, scope: str, world: _World, member: str, now: float) -> None:
        """Nobody waits for a member any more."""
        world.requests.pop(member, None)
        world.announced.discard(member)
        if member in world.members:
            if world.is_changing:
                self._try_switch(scope, world)
            self._advance(scope, world, now)

    def tick(self, now: float) -> None:
        """Do what is due by the time."""
        for scope, world in list(self._worlds.items()):
            self._advance(scope, world, now)

    def _world(self, message: Message) -> _World:
        """Return the world of a message, which its first member makes."""
        limits = message["minimum"], message["maximum"], message["expected"]
        if not 0 < limits[0] <= limits[1] <= _MOST_MEMBERS or not all(isinstance(each, int) for each in limits):
            raise ProtocolError("a world has 1 member or more, and no more than its maximum")
        if message["scope"] not in self._worlds and len(self._worlds) >= _MOST_WORLDS:
            raise ProtocolError(f"there are {_MOST_WORLDS} worlds already")
        return self._worlds.setdefault(message["scope"], _World(*limits))

    def _takes_part(self, world: _World, member: str) -> bool:
        return member not in world.departed and self._describe(member) is not None

    def _advance(self, scope: str, world: _World, now: float) -> None:
        """Form the next generation if all that belong to it have asked; otherwise have the others asked to stop."""
        if not world.has_begun:
            self._begin(scope, world, now)
            return
        living = self._living(world)
        if not living:
            self._end(scope, world)
        elif all(member in world.requests for member in living):
            staying = self._release(scope, world, living)
            chosen = [*staying, *world.newcomers()][: world.maximum]
            too_few = len(chosen) < world.minimum and not world.is_finished
            more_may_come = any(self.replaces.values()) or now - world.asked_at < _TOO_FEW_S
            if not (too_few and more_may_come):
                self._form(scope, world, chosen, too_few)
        elif world.newcomers() and len(living) < world.maximum:
            self._ask_for_boundaries(scope, world)

    def _release(self, scope: str, world: _World, living: list[str]) -> list[str]:
        """Let members go that want to leave, if others stay; return the members of the next generation."""
        leaving = [member for member in living if world.requests[member].info.get("leaving")]
        if len(leaving) == len(living):
            return living  # Nobody else has the state.
        for member in leaving:
            del world.requests[member]
            world.members.remove(member)
            world.released.add(member)
            self._send(member, {"op": "released", "scope": scope, "number": world.number})
        return [member for member in living if member not in leaving]

    def _begin(self, scope: str, world: _World, now: float) -> None:
        """Form the first generation, if enough members have come."""
        come = len(world.requests)
        settled = come >= world.minimum and now - world.asked_at >= _SETTLE_S
        if settled or come >= max(world.minimum, min(world.expected, world.maximum)):
            chosen = list(world.requests)[: world.maximum]
            by_number = sorted(chosen, key=lambda member: (self._describe(member) or {"rank": -1})["rank"])
            self._form(scope, world, by_number, too_few=False)

    def _end(self, scope: str, world: _World) -> None:
        """All members of a world have ended: nobody is there to whom new ones could come."""
        is_over = world.is_finished or any(member in world.departed for member in world.members)
        reason = TRAINING_HAS_ENDED if is_over else WORKERS_ARE_LOST
        for member in {*world.requests, *world.announced}:
            self._send(member, {"op": "conflict", "scope": scope, "reason": reason})
        world.requests.clear()
        world.announced.clear()
        world.has_begun = is_over

    def _form(self, scope: str, world: _World, chosen: list[str], too_few: bool) -> None:
        requests = {member: world.requests.pop(member) for member in chosen}
        world.number, world.has_begun = world.number + 1, True
        world.members = chosen
        world.departed.clear()
        world.boundaries.clear()
        world.is_changing = world.is_switching = False
        members = [
            {"member": self._describe(each), "after": requests[each].after, "info": requests[each].info}
            for each in chosen
        ]
        fields = {"scope": scope, "number": world.number, "members": members, "too_few": int(too_few)}
        world.announcement = {"op": "generation", **fields}
        self._meet(f"{scope}.{world.number}", chosen)
        for member in chosen:
            self._send(member, world.announcement)
        # New ones that were not chosen, because there was no room, and those that asked whether it has begun.
        for member, request in list(world.requests.items()):
            if not request.ready:
                del world.requests[member]
                world.announced.add(member)
                self._send(member, {"op": "running", "scope": scope, "size": len(chosen)})

    def _ask_for_boundaries(self, scope: str, world: _World) -> None:
        """Ask all members after how many steps they can stop, once in a generation."""
        if not world.has_begun or world.is_changing:
            return
        world.is_changing = True
        for member in self._living(world):
            self._send(member, {"op": "change", "scope": scope, "number": world.number})

    def _try_switch(self, scope: str, world: _World) -> None:
        """Tell all members after how many steps to stop, once all have answered."""
        living = self._living(world)
        if not living or world.is_switching or not all(member in world.boundaries for member in living):
            return
        world.is_switching = True
        steps = max(world.boundaries[member] for member in living)
        for member in living:
            self._send(member, {"op": "switch", "scope": scope, "number": world.number, "steps": steps})

    def _living(self, world: _World) -> list[str]:
        """Return the members of the present generation that still take part, by rank."""
        return [member for member in world.members if self._takes_part(world, member)]
