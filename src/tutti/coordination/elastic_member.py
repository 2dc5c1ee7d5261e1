"""`ElasticMember`: a process's part in a world that may lose and gain members, generation by generation.

How it works
------------
Two threads are involved. The training thread calls everything but `_changed`, which the thread of the connection calls
whenever the coordinator has told something.

A generation can end between any two steps. `stops_here` is called there, and counts the steps of this generation:
`_steps` of them are over, so the next place where this rank can stop is after `_steps` steps. When the coordinator asks
for that place (`change`), the thread of the connection answers at once with `_steps`, under the lock, also while the
training thread computes or waits for another rank: so the answer never has to wait for a step. From then on the
training thread does not pass that place before it knows where all stop (`switch`), which is at or behind it. No rank
can be needed by others before that: the others answer as soon as they are asked, too.

Waits: `enter` and `stops_here` end when the coordinator has answered, which it does when all living members have
asked, or answered; and when this process is excluded (`RankLost`).
"""

import threading
from dataclasses import dataclass
from math import inf
from typing import Any

from tutti.coordination.description import MemberDescription
from tutti.coordination.frames import Message
from tutti.coordination.generations import TRAINING_HAS_ENDED, WORKERS_ARE_LOST
from tutti.coordination.member import Member
from tutti.errors import EnvironmentConflict, RankLost, TrainingEnded


@dataclass(frozen=True)
class WorldLimits:
    """How many members a world may have."""

    minimum: int
    maximum: int
    expected: int
    """Number of members that the launcher has started."""


@dataclass(frozen=True)
class GenerationMemberInfo:
    """A member of a generation, as all others see it."""

    description: MemberDescription
    after: int
    """The generation that it was in before; -1 if it is new."""
    info: dict[str, Any]
    """The values with which it entered."""


@dataclass(frozen=True)
class Generation:
    """A numbered, agreed set of members, by rank."""

    number: int
    scope: str
    """The scope at the coordinator in which its members meet."""
    members: tuple[GenerationMemberInfo, ...]
    too_few: bool
    """Whether they are fewer than the minimum, and no more will come: they save their state and end."""


class ElasticMember:
    """This process in one elastic world."""

    def __init__(self, member: Member, name: str, limits: WorldLimits) -> None:
        """Take part in the world called `name`; nothing is sent before `enter`."""
        self.member, self.name, self.limits = member, name, limits
        self.generation: Generation | None = None
        """The generation that this process is in."""
        self._lock = threading.Lock()
        self._steps = 0
        self._answered: int | None = None
        """The number of steps with which this process has answered, in this generation."""
        self._leaves: int | None = None
        """The generation that this process last wanted to leave."""
        member.on_change(self._changed)

    @property
    def number(self) -> int:
        """Number of the present generation; -1 before the first."""
        return -1 if self.generation is None else self.generation.number

    @property
    def is_released(self) -> bool:
        """Whether the others have let this process go."""
        return self.name in self.member.known.released

    @property
    def all_leave(self) -> bool:
        """Whether all members of this generation want to leave."""
        return self.generation is not None and all(each.info.get("leaving") for each in self.generation.members)

    @property
    def rank(self) -> int:
        """The rank of this process in the present generation."""
        assert self.generation is not None
        ids = [each.description.id for each in self.generation.members]
        return ids.index(self.member.description.id)

    def enter(self, info: dict[str, Any], *, ready: bool = True) -> Generation | None:
        """Ask for the next generation, and wait until it is formed.

        Args:
            info: a few values that all other members get.
            ready: with False, return None at once if the world has begun without this process.

        Returns None also if this process is let go: it has given "leaving" among its values, and others stay. Raises
        `EnvironmentConflict` if there is no place for this process, and `TrainingEnded` if it comes too late.
        """
        member, before = self.member, self.number

        def formed() -> bool:
            return member.known.generations.get(self.name, {"number": -1})["number"] > before

        limits = {
            "minimum": self.limits.minimum,
            "maximum": self.limits.maximum,
            "expected": self.limits.expected,
        }
        key = ("enter", self.name)
        message = {"op": "enter", "scope": self.name, "after": before, "ready": int(ready), **limits, "info": info}
        member.send(key, message)
        others = [each.description.rank for each in self.generation.members] if self.generation else []
        action = "come: the world changes its members"
        try:
            with member.activity.waiting(
                [rank for rank in others if rank != member.description.rank], action, any_of=True, observed=False
            ):
                member.wait(
                    lambda: formed() or self.is_released or (not ready and self.name in member.known.running),
                    self.check,
                    inf,
                )
        finally:
            member.withdraw(key)
        if not formed():
            return None
        self._take(member.known.generations[self.name])
        assert self.generation is not None
        ids = [each.description.id for each in self.generation.members]
        belongs = {"op": "belongs", "scope": self.name, "number": self.number, "members": ids, **limits}
        member.send(("belongs", self.name), belongs)
        return self.generation

    def _take(self, message: Message) -> None:
        members = tuple(
            GenerationMemberInfo(MemberDescription.from_json(each["member"]), each["after"], each["info"])
            for each in message["members"]
        )
        with self._lock:
            number = message["number"]
            self.generation = Generation(number, f"{self.name}.{number}", members, bool(message["too_few"]))
            self._steps, self._answered = 0, None
        self._changed()  # It may be asked for a boundary already.

    def check(self) -> None:
        """Raise an error if there is no place for this process, or nobody left to join."""
        if (conflict := self.member.known.conflicts.get(self.name)) is not None:
            kind = {TRAINING_HAS_ENDED: TrainingEnded, WORKERS_ARE_LOST: RankLost}.get(conflict, EnvironmentConflict)
            raise kind(f"rank {self.member.description.rank}: {conflict}.")

    def lost(self) -> list[int]:
        """Return the numbers, as their launcher gave them, of members of this generation that are lost."""
        members = self.generation.members if self.generation is not None else ()
        lost = self.member.known.lost
        return [each.description.rank for each in members if each.description.id in lost]

    def stops_here(self) -> bool:
        """Return whether this generation ends here, between two steps; otherwise count the step that follows."""
        switch = self.member.known.switches
        with self._lock:
            if self._answered is None:
                self._steps += 1
                return False

        def decided() -> bool:
            return switch.get(self.name, (-1, 0))[0] == self.number

        self.member.wait(decided, lambda: None, inf)
        with self._lock:
            if self._steps >= switch[self.name][1]:
                return True
            self._steps += 1
            return False

    def leave(self) -> None:
        """Have the generation end soon, because this process wants to leave. Does nothing when called again."""
        if self._leaves != self.number:
            self._leaves = self.number
            self.member.send(("want", self.name), {"op": "want", "scope": self.name, "number": self.number})

    def depart(self, *, finished: bool) -> None:
        """Take no more part; `finished` says whether the training has come to its end."""
        self.member.withdraw(("belongs", self.name))
        self.member.send(("depart", self.name), {"op": "depart", "scope": self.name, "finished": int(finished)})

    def _changed(self) -> None:
        """Answer the coordinator, which asks where this process can stop. Called by any thread."""
        with self._lock:
            if self.generation is None or self._answered is not None:
                return
            if self.member.known.changes.get(self.name) != self.generation.number:
                return
            self._answered, number = self._steps, self.generation.number
        message = {"op": "boundary", "scope": self.name, "number": number, "steps": self._answered}
        self.member.send(("boundary", self.name), message)
