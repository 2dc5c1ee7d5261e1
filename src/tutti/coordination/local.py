"""A coordinator for members that are threads of one process: the same state and views, without a connection.

How it works
------------
A message is put into `_inbox`, and handled by the thread that sends it, or by one that handles others at that moment:
whoever has `_lock` handles all that is there, and delivers the answers. Nobody waits for `_lock` to send. So a member
may send while it is told something, also while another of its threads sends.
"""

import threading
import time
from collections import deque

import tutti
from tutti.coordination.description import MemberDescription
from tutti.coordination.frames import Message
from tutti.coordination.member import Member
from tutti.coordination.state import CoordinatorState


class LocalCoordinator:
    """Joins members of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inbox: deque[tuple[str, Message]] = deque()
        self._state = CoordinatorState(float("inf"), "this process", time.monotonic())
        self._members: dict[str, Member] = {}

    def member(self, description: MemberDescription) -> Member:
        """Make a member and connect it."""
        member = Member(description)
        with self._lock:  # Ended by the thread that handles messages, which waits for nothing.
            self._members[description.id] = member
            self._state.connect(member.hello(tutti.__version__), time.monotonic())
            member.attach(lambda message: self._receive(description.id, message))
            self._deliver()
        self._handle()
        return member

    def _receive(self, member: str, message: Message) -> None:
        self._inbox.append((member, message))
        self._handle()

    def _handle(self) -> None:
        """Handle what is in the inbox, unless another thread does."""
        # Again after the lock is released: something may have come just before, whose sender could not have it.
        while self._inbox and self._lock.acquire(blocking=False):
            try:
                while self._inbox:
                    self._state.receive(*self._inbox.popleft(), time.monotonic())
                    self._deliver()
            finally:
                self._lock.release()

    def _deliver(self) -> None:
        for member, message in self._state.drain():
            self._members[member].received(message)
