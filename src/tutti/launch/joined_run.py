"""`JoinedRun`: the run of another launcher, to which a launcher on this host adds workers.

How it works. The launcher connects to the run's coordinator as an observer, and asks it for the numbers of its workers,
which differ from those of all other launchers, and for the limits of the run. It says whether workers of its own are
about to join, so that others with too few members wait for them.

The coordinator excludes a worker that is silent. Its own launcher cannot end a process on this host, so this one looks
at the members of this host from time to time, and ends those that are lost.

If the coordinator is away for `_GONE_S`, the run's launcher has ended: workers that still run are ended as well.
"""

import time
from collections import deque
from datetime import timedelta
from typing import Any

from tutti.coordination import MemberDescription, Secret
from tutti.coordination.diagnosis import HeldUp
from tutti.coordination.knowledge import LEFT
from tutti.coordination.launchers import ManagementRequest, Numbers
from tutti.coordination.link import Endpoint, connect_member
from tutti.errors import ConfigError, RankLost
from tutti.launch.host import host_id

_ANSWER_S = 5.0
_LOOK_S, _LOOK_LIMIT_S = 1.0, 0.2
_GONE_S = 20.0


class JoinedRun:
    """A connection to the run of another launcher. Close it at the end."""

    def __init__(self, endpoint: Endpoint, secret: Secret, num_workers: int) -> None:
        """Connect, and get numbers for `num_workers` workers."""
        observer = MemberDescription.this_process(-1, "launcher", "launcher")
        self.endpoint, self.secret, self.num_workers = endpoint, secret, num_workers
        self._member = connect_member(observer, endpoint, secret, timeout=timedelta(seconds=_ANSWER_S))
        self.held_up: tuple[HeldUp, ...] = ()
        """The launcher of the run shows who holds others up."""
        self.requests: deque[ManagementRequest] = deque()
        """The launcher of the run is asked for changes."""
        self._evicted: deque[tuple[MemberDescription, str]] = deque()
        self._seen: dict[str, MemberDescription] = {}
        """Members of this host."""
        self._looked_at = 0.0
        try:
            found = self._numbers(num_workers)
            if found.present + num_workers > found.maximum:
                raise ConfigError(
                    f"the run at {endpoint} has {found.present} workers, and at most {found.maximum} are allowed: "
                    f"{num_workers} more cannot join. Ask for fewer with --workers, or start the run with a larger "
                    "maximum."
                )
            self.first_number, self.limits = found.first, (found.minimum, found.maximum)
        except BaseException:
            self.close()
            raise

    def _numbers(self, count: int) -> Numbers:
        answer: Numbers | None = self._member.request({"op": "numbers", "count": count}, _ANSWER_S, lambda: None)
        if answer is None:
            raise RankLost(f"the coordinator at {self.endpoint} has not answered for {_ANSWER_S:g} s.")
        if answer.first < 0:
            raise ConfigError(
                f"the run at {self.endpoint} has a fixed number of workers, so none can join. Start it with tutti run "
                "--workers MIN:MAX."
            )
        return answer

    def take_numbers(self, count: int) -> int:
        """Return the first of `count` further numbers."""
        return self._numbers(count).first

    def replaces_workers(self, yes: bool) -> None:
        """Say whether workers of this launcher are about to join."""
        self._member.outbox.send(("replaces", "launcher"), {"op": "replaces", "yes": int(yes)})

    def answer(self, asked: ManagementRequest, text: str, *, done: bool) -> None:
        """Nobody asks this launcher for anything."""

    def present(self) -> list[int]:
        """Nobody asks this launcher for anything."""
        return []

    @property
    def is_gone(self) -> bool:
        """Whether the run's launcher has ended."""
        since = self._member.away_since
        return self._member.known.refused is not None or (since is not None and time.monotonic() - since > _GONE_S)

    @property
    def evicted(self) -> deque[tuple[MemberDescription, str]]:
        """Members of this host that the others go on without, and why. Its reader empties it."""
        if time.monotonic() - self._looked_at > _LOOK_S and self._member.connected:
            here = host_id()
            found = [MemberDescription.from_json({name: row[name] for name in _FIELDS}) for row in self._rows()]
            self._seen |= {each.id: each for each in found if each.host_id == here}
            self._looked_at = time.monotonic()
        for member in self._member.known.lost.keys() & self._seen.keys():
            description, reason = self._seen.pop(member), self._member.known.lost[member]
            if reason != LEFT:  # That one ends by itself.
                self._evicted.append((description, reason))
        return self._evicted

    def _rows(self) -> list[dict[str, Any]]:
        return self._member.table(_LOOK_LIMIT_S) or []

    def close(self) -> None:
        """End the connection."""
        self._member.close()


_FIELDS = tuple(MemberDescription.__dataclass_fields__)
