"""A coordinator for members that are threads of one process: the same state and views, without a connection."""

import threading
import time

import tutti
from tutti.coordination.description import MemberDescription
from tutti.coordination.frames import Message
from tutti.coordination.member import Member
from tutti.coordination.state import CoordinatorState


class LocalCoordinator:
    """Joins members of this process. Messages are handled at once, by the thread that sends them."""

    def __init__(self) -> None:
        # Re-entrant: a member that is told something may answer while it is told.
        self._lock = threading.RLock()
        self._state = CoordinatorState(float("inf"), "this process", time.monotonic())
        self._members: dict[str, Member] = {}

    def member(self, description: MemberDescription) -> Member:
        """Make a member and connect it."""
        member = Member(description)
        with self._lock:
            self._members[description.id] = member
            self._state.connect(member.hello(tutti.__version__), time.monotonic())
            member.attach(lambda message: self._receive(description.id, message))
            self._deliver()
        return member

    def _receive(self, member: str, message: Message) -> None:
        with self._lock:
            self._state.receive(member, message, time.monotonic())
            self._deliver()

    def _deliver(self) -> None:
        for member, message in self._state.drain():
            self._members[member].received(message)
