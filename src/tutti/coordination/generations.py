"""Generations: the numbered, agreed sets of members of a world that may lose and gain members.

How it works
------------
An elastic world goes through generations 0, 1, 2, ... Each is a list of members, of which the n-th has rank n. Once it
is formed it never changes. `GenerationTable` holds the worlds of a job, checks what members send, and passes it on to
the world that it is about (`elastic_world`). `elastic_decisions` decides; members only ask:

- *enter*: a member has ended its part in its generation, or is new, and asks for the next one. The next one is formed
  when all living members of the present one have asked. So nobody waits for a lost member, and nobody is in two
  generations. Those that were there keep their order; new ones follow in the order in which they came, up to the
  maximum. Each enters with a few values of its own, which all get.
- A new member asks twice: first whether the world has begun (`ready` is False where its answer may be "running"), and
  again when it has built its model. Only then do the others stop for it.
- *depart*: a member has ended its training. Nobody waits for it any more, and it does not return.
- *leave*: a member that enters with "leaving" among its values is not in the next generation, if others stay. It is
  *released* as soon as all have asked. If all want to leave, they go on together once more, and so can save the state.
- *want*, *boundary*: about the end of a generation in which nobody is lost.
- *belongs*, *recalled*: which generation a member is in, and who else is.

What a member can leave behind here is bounded: one request, boundary and wish for each of `_MOST_WORLDS` worlds, and
values of `LONGEST_INFO` bytes with a request. All of it ends with the member.
"""

import json
from collections.abc import Callable
from typing import Any

from tutti.coordination.description import MemberDescription
from tutti.coordination.elastic_decisions import adopt, advance, begin
from tutti.coordination.elastic_world import ElasticWorld, MemberRequest, Members
from tutti.coordination.frames import Message, ProtocolError

MOST_WORKERS = 1_000
"""Members of the largest elastic world: the description of a generation is one message (`frames.MAX_BYTES`)."""
LONGEST_INFO = 64 << 10
"""Bytes of the values with which a member enters, as JSON."""
_MOST_WORLDS = 100
_LONGEST_NAME = 1_000
_LARGEST = 1 << 62
"""Numbers of generations and steps are smaller."""


class GenerationTable:
    """The elastic worlds of a job."""

    def __init__(self, members: Members, patience_s: float, now: float) -> None:
        """Start without any.

        Args:
            members: who is there, and how to reach them.
            patience_s: how long new members wait, at a coordinator that was started anew, for those that know the
                present generation.
        """
        self._members, self._patience_s, self._started = members, patience_s, now
        self._worlds: dict[str, ElasticWorld] = {}
        self.replaces: dict[str, bool] = {}
        """Whether workers come that a launcher has started or is about to start, by launcher."""
        self.handlers: dict[str, Callable[[str, Message, float], None]] = {
            "enter": self.enter,
            "belongs": self.belongs,
            "recalled": self.recalled,
            "depart": self.depart,
            "want": self.want,
            "boundary": self.boundary,
            "replaces": lambda member, message, _: self.replaces.update({member: bool(message["yes"])}),
        }
        """What is called with a member, its message, and the time."""

    def number_of(self, member: str) -> int | None:
        """Return the number of the generation that a member is in; None if it is in none."""
        return next((world.number for world in self._worlds.values() if member in world.members), None)

    # Messages of members

    def enter(self, member: str, message: Message, now: float) -> None:
        """A member asks for the generation after its own."""
        after, info = _number(message, "after", least=-1), message["info"]
        if len(json.dumps(info)) > LONGEST_INFO:
            raise ProtocolError(f"a member enters with values of {LONGEST_INFO} bytes at most")
        if (world := self._world(member, message)) is not None:
            world.enter(member, MemberRequest(after, bool(message["ready"]), info, now), now)
            self._advance(world, now)

    def belongs(self, member: str, message: Message, now: float) -> None:
        """A member says which generation it is in: when that has begun, and whenever it has connected."""
        number = _number(message, "number")
        if (world := self._world(member, message)) is not None:
            world.belongs(member, number)
            self._advance(world, now)

    def recalled(self, member: str, message: Message, now: float) -> None:
        """A member describes its generation to a coordinator that was started after it was formed."""
        number, described = _number(message, "number"), message["members"]
        if (world := self._worlds.get(message["scope"])) is None or number <= world.number:
            return
        if len(described) > MOST_WORKERS or not all(map(_is_described, described)):
            raise ProtocolError("a generation is described by its members")
        ids = [each["member"]["id"] for each in described]
        if not world.has_asked(member, "recall") or member not in ids or len(set(ids)) != len(ids):
            raise ProtocolError("a generation that this member is not in")
        adopt(world, message)
        self._advance(world, now)

    def depart(self, member: str, message: Message, now: float) -> None:
        """A member has ended its part in a world for good."""
        if (world := self._world(member, message)) is not None:
            world.depart(member, bool(message["finished"]))
            self._advance(world, now)

    def want(self, member: str, message: Message, now: float) -> None:
        """A member wants to leave, or knows another reason why its generation should end."""
        number = _number(message, "number")
        if (world := self._world(member, message)) is not None:
            world.wants[member] = number
            self._advance(world, now)

    def boundary(self, member: str, message: Message, now: float) -> None:
        """A member says after how many steps of its generation it can stop."""
        boundary = _number(message, "number"), _number(message, "steps")
        if (world := self._world(member, message)) is not None:
            world.boundaries[member] = boundary
            self._advance(world, now)

    # What else happens

    def lost(self, member: str, now: float) -> None:
        """A member is lost, or has ended."""
        for world in list(self._worlds.values()):
            world.lost(member)
            self._advance(world, now)

    def tick(self, now: float) -> None:
        """Do what is due by the time."""
        for world in list(self._worlds.values()):
            self._advance(world, now)

    def _advance(self, world: ElasticWorld, now: float) -> None:
        if world.has_begun:
            advance(world, any(self.replaces.values()), now)
        else:
            begin(world, now, self._started, self._patience_s)

    def _world(self, member: str, message: Message) -> ElasticWorld | None:
        """Return the world of a message, which its first member makes; None if this member has other limits."""
        scope, limits = message["scope"], (message["minimum"], message["maximum"])
        if not 0 < limits[0] <= limits[1] <= MOST_WORKERS or not 0 < message["expected"] < _LARGEST:
            raise ProtocolError(f"a world has 1 to {MOST_WORKERS} members, and its minimum is not above its maximum")
        if len(scope) > _LONGEST_NAME:
            raise ProtocolError(f"the name of a world has {_LONGEST_NAME} characters at most")
        world = self._worlds.get(scope)
        if world is None:
            self._make_room()
            made = ElasticWorld(scope, *limits, message["expected"], self._members)
            world = self._worlds[scope] = made
        if limits != (world.minimum, world.maximum):
            theirs = f"{world.minimum} to {world.maximum}"
            reason = f"this process was started for {limits[0]} to {limits[1]} workers, and others for {theirs}"
            world.refuse(member, reason)
            return None
        return world

    def _make_room(self) -> None:
        """Forget a world that is over, where there are as many as may be."""
        if len(self._worlds) >= _MOST_WORLDS:
            over = next((scope for scope, world in self._worlds.items() if world.is_over), None)
            if over is None:
                raise ProtocolError(f"there are {_MOST_WORLDS} worlds already")
            del self._worlds[over]


def _number(message: Message, name: str, least: int = 0) -> int:
    number: int = message[name]
    if not least <= number < _LARGEST:
        raise ProtocolError(f"'{message['op']}' has a '{name}' that no member sends")
    return number


def _is_described(fields: Any) -> bool:
    """Check a member of a generation, as the message about it has them. Raises `ProtocolError` for a bad identity."""
    if not isinstance(fields, dict) or fields.keys() != {"member", "after", "info"}:
        return False
    MemberDescription.from_json(fields["member"])
    return type(fields["after"]) is int and isinstance(fields["info"], dict)
