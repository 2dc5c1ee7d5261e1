"""`LauncherTable`: what launchers of an elastic run ask of its coordinator, and what users ask of the launcher.

- Workers of one run have different numbers, whichever launcher starts them, and no number is used twice. So launchers
  take them from here (`take`; from another host by the message "numbers").
- `tutti workers` asks the launcher that serves the coordinator for more or fewer workers ("manage"). The launcher takes
  the requests out of `requests` and answers each; who asked waits for that no longer than its own limit.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tutti.coordination.frames import Message, ProtocolError

_MOST_NUMBERS = 5_000
_MOST_REQUESTS = 100


class Numbers(NamedTuple):
    """What another launcher gets that asks for numbers."""

    first: int
    """The first number; -1 where the number of workers is fixed."""
    minimum: int
    maximum: int
    present: int
    """Number of workers that are there."""


class ManagementRequest(NamedTuple):
    """What a user asks of the launcher."""

    member: str
    """Id of the observer that waits for the answer."""
    request: int
    action: str
    """"add" or "remove"."""
    number: int
    """Number of workers to add, or the number of the worker to remove."""


class LauncherTable:
    """Numbers of workers, and requests to the launcher."""

    def __init__(self, send: Callable[[str, Message], None]) -> None:
        """Send messages to members by `send`."""
        self._send = send
        self.next_number = 0
        """The number of the next worker."""
        self.limits: tuple[int, int] | None = None
        """The fewest and the most workers, where they may come and go."""
        self.requests: deque[ManagementRequest] = deque()
        """Requests that the launcher has not taken out yet."""

    def take(self, count: int) -> int:
        """Return the first of `count` numbers that nobody else gets."""
        first = self.next_number
        self.next_number += count
        return first

    def numbers(self, member: str, message: Message, num_present: int) -> None:
        """Another launcher asks for numbers. A run with a fixed number of workers has none for it."""
        if not 0 < message["count"] <= _MOST_NUMBERS:
            raise ProtocolError(f"a launcher starts 1 to {_MOST_NUMBERS} workers")
        first, limits = (-1, (0, 0)) if self.limits is None else (self.take(message["count"]), self.limits)
        found = Numbers(first, *limits, num_present)
        self._send(member, {"op": "numbered", "request": message["request"], **found._asdict()})

    def manage(self, member: str, message: Message) -> None:
        """A user asks for more or fewer workers."""
        asked = ManagementRequest(member, message["request"], message["action"], message["number"])
        if asked.action not in ("add", "remove"):
            raise ProtocolError(f"launchers do not know '{asked.action[:40]}'")
        if self.limits is None:
            self.answer(asked, "this run has a fixed number of workers: start it with --workers MIN:MAX", done=False)
        elif len(self.requests) >= _MOST_REQUESTS:
            self.answer(asked, "the launcher has too many requests to answer already", done=False)
        else:
            self.requests.append(asked)

    def answer(self, asked: ManagementRequest, text: str, *, done: bool) -> None:
        """Tell who asked what was done, or why it was not."""
        self._send(asked.member, {"op": "managed", "request": asked.request, "done": int(done), "text": text})
