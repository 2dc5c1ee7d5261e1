"""`ElasticMember`: a process's part in a world that may lose and gain members, generation by generation.

How it works
------------
Two threads are involved. The training thread calls everything but `_changed`, which the thread of the connection calls
whenever the coordinator has told something. `_lock` guards what both use; nothing is sent while it is held.
`_confirming` is held while `belongs` is sent: whoever comes second finds it in the outbox.

A generation can end between any two steps. `stops_here` is called there, and counts the steps of this generation:
`_steps` of them are over, so the next place where this rank can stop is after `_steps` steps. When the coordinator asks
for that place (`change`), the thread of the connection answers at once with `_steps`, under the lock, also while the
training thread computes or waits for another rank: so the answer never has to wait for a step. From then on the
training thread does not pass that place before it knows where all stop (`switch`), which is at or behind it. No rank
can be needed by others before that: the others answer as soon as they are asked, too.

A rank that has no more steps (`comes_to_end`) waits for the others to come to the end as well. From then on it answers
that it can stop behind all steps (`_END`), so that the others take theirs first. If it had answered before, with its
last step, the others may stop there: then it goes with them.

A coordinator that was started anew gets from the outbox: that this process asks for a generation (`enter`) or is in one
(`belongs`), never both. The thread of the connection changes the one into the other as soon as the generation is told,
so that no coordinator takes an old request for one for the generation after it. It also gets what this process has
answered (`boundary`), which is the switch once that is known, so that the new coordinator decides the same. It may ask
this process to describe its generation (`recall`).

Waits: `enter` and `stops_here` end when the coordinator has answered, which it does when all living members have
asked, or answered; at the timeout, where too few come to begin; when this process is excluded, or the coordinator was
in the process of a rank that is lost (`RankLost`); and when there is no place for this process (`EnvironmentConflict`).
"""

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from math import inf
from typing import Any

from tutti.coordination.activity import MEMBERSHIP_ACTION
from tutti.coordination.description import MemberDescription
from tutti.coordination.elastic_decisions import TRAINING_HAS_ENDED, WORKERS_ARE_LOST
from tutti.coordination.frames import Message
from tutti.coordination.member import Member, check_coordinator
from tutti.errors import DeadlineExceeded, EnvironmentConflict, RankLost, TrainingEnded

_END = 1 << 40
"""The number of steps behind which ranks stop that have no more; no generation has as many."""


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
        self._is_at_end = False
        """Whether this process has no more steps in this generation."""
        self._answered: int | None = None
        """The number of steps with which this process has answered, in this generation."""
        self._confirming = threading.RLock()
        self._confirmed = -1
        """The last generation of which the coordinator was told that this process is in it."""
        self._wanted = -1
        """The last generation that this process has asked to end."""
        self._has_departed = self._has_finished = False
        self._listening = member.on_change(self._changed)

    @property
    def number(self) -> int:
        """Number of the present generation; -1 before the first."""
        return -1 if self.generation is None else self.generation.number

    @property
    def is_released(self) -> bool:
        """Whether the others have let this process go."""
        return self.name in self.member.known.released

    @property
    def has_departed(self) -> bool:
        """Whether this process has ended its part."""
        return self._has_departed

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

    def enter(self, info: dict[str, Any], *, ready: bool = True, timeout: timedelta | None = None) -> Generation | None:
        """Ask for the next generation, and wait until it is formed.

        Args:
            info: a few values that all other members get (`generations.LONGEST_INFO`).
            ready: with False, take part in the first generation, or return None at once if the world has begun without
                this process, which then enters again when it is ready for a later one.
            timeout: how long to wait for the others, where nobody else ends that wait: for the first generation, which
                does not begin without the minimum.

        Returns None also if this process is let go: it has given "leaving" among its values, and others stay. Raises
        `EnvironmentConflict` if there is no place for this process, `TrainingEnded` if it comes too late, and
        `DeadlineExceeded` after `timeout`.
        """
        known, before, key = self.member.known, self.number, ("enter", self.name)

        def formed() -> bool:
            return self._newest > before

        self.member.outbox.withdraw(("belongs", self.name))
        self._send("enter", after=before, ready=int(ready), info=info)
        try:
            self._wait(lambda: formed() or self.is_released or (not ready and self.name in known.running), timeout)
        except BaseException:
            self.member.outbox.withdraw(key)
            raise
        self.member.outbox.withdraw(key)
        if not formed():
            return None
        self._take(known.generations[self.name])
        return self.generation

    def _take(self, message: Message) -> None:
        members = tuple(
            GenerationMemberInfo(MemberDescription.from_json(each["member"]), each["after"], each["info"])
            for each in message["members"]
        )
        with self._lock:
            number = message["number"]
            self.generation = Generation(number, f"{self.name}.{number}", members, bool(message["too_few"]))
            self._steps, self._answered, self._is_at_end = 0, None, False
        self.member.outbox.withdraw(("boundary", self.name), ("want", self.name))
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
        self.check()  # Else a process that the others have gone on without could train on alone.
        with self._lock:
            if self._answered is None:
                self._steps += 1
                return False
        self._wait(lambda: self._switch is not None)
        stop = self._switch
        assert stop is not None
        with self._lock:
            if self._steps >= stop:
                return True
            self._steps += 1
            return False

    def comes_to_end(self) -> bool:
        """This process has no more steps. Return whether this generation ends before all have come to their end."""
        with self._lock:
            self._is_at_end = True
            if self._answered is None:
                return False
        self._wait(lambda: self._switch is not None)
        stop = self._switch
        assert stop is not None
        with self._lock:
            self._steps = max(self._steps, stop)  # It stops at the next place, however many steps others take.
        return stop < _END

    def all_are_at_end(self) -> None:
        """All that are left have come to the end of their steps: this generation can end, but need not."""
        with self._lock:
            self._steps = _END

    def leave(self) -> None:
        """Have the present generation end soon, because this process wants to leave."""
        if self._wanted < self.number:
            self._wanted = self.number
            self._send("want", number=self.number)

    def depart(self, *, finished: bool, as_lost: bool = False) -> None:
        """Take no more part; `finished` says whether the training has come to its end. Idempotent.

        Args:
            as_lost: as if this process were lost: those that come later may begin anew.
        """
        if self._has_departed and self._has_finished >= finished:
            return
        self._has_departed, self._has_finished = True, self._has_finished or finished
        self._listening()
        if as_lost:
            self._has_finished = True  # Nothing is said later either.
            return
        self.member.outbox.withdraw(*((op, self.name) for op in ("enter", "belongs", "want", "boundary")))
        self._send("depart", finished=int(finished))

    # The coordinator's side

    @property
    def _newest(self) -> int:
        """The number of the newest generation with this process that was formed."""
        formed = self.member.known.generations.get(self.name)
        return -1 if formed is None else int(formed["number"])

    @property
    def _switch(self) -> int | None:
        """After how many steps all members of the present generation stop; None while that is not known."""
        number, steps = self.member.known.switches.get(self.name, (-1, 0))
        return steps if number == self.number else None

    def _send(self, op: str, **fields: Any) -> None:
        """Send a message about this world, to later coordinators too."""
        self.member.outbox.send((op, self.name), {"op": op, "scope": self.name, **asdict(self.limits), **fields})

    def _wait(self, over: Callable[[], bool], timeout: timedelta | None = None) -> None:
        """Wait for the coordinator, which waits for the other members that are alive."""
        member = self.member

        def check() -> None:
            self.check()
            check_coordinator(member)

        members = self.generation.members if self.generation is not None else ()
        others = {each.description.rank for each in members if each.description.id not in member.known.lost}
        ranks = sorted(others - {member.description.rank})
        with member.activity.waiting(ranks, MEMBERSHIP_ACTION, any_of=True, observed=False):
            if not member.wait(over, check, inf if timeout is None else timeout.total_seconds()):
                assert timeout is not None
                raise DeadlineExceeded(
                    f"rank {member.description.rank}: after {timeout.total_seconds():g} s fewer than "
                    f"{self.limits.minimum} workers are here, with which this run begins. Look whether they were "
                    f"started, and whether they reach {member.place}; tutti.init(timeout=...) waits longer."
                )

    def _changed(self) -> None:
        """Answer the coordinator. Called by any thread."""
        known, name = self.member.known, self.name
        with self._confirming:
            if (newest := self._newest) > self._confirmed:
                self._confirmed = newest
                self.member.outbox.withdraw(("enter", name))
                self._send("belongs", number=newest)
        if known.recalls.pop(name, -1) >= 0 and self._newest >= 0:
            self.member.outbox.post({**known.generations[name], "op": "recalled"})
        with self._lock:
            if self.generation is None:
                return
            if self._answered is None and known.changes.get(name) == self.number:
                self._answered = _END if self._is_at_end else self._steps
            elif self._answered is None or self._switch is None or self._switch <= self._answered:
                return
            else:
                self._answered = self._switch  # Of a coordinator that may be gone before all others have heard of it.
            number, steps = self.number, self._answered
        self._send("boundary", number=number, steps=steps)
