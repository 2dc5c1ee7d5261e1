"""`RunControl`: a run's coordinator as a supervisor sees it, served by its own process or by another launcher's.

`Coordinator` and `JoinedRun` are the two kinds.
"""

from collections import deque
from typing import Protocol

from tutti.coordination import MemberDescription
from tutti.coordination.diagnosis import HeldUp
from tutti.coordination.launchers import ManagementRequest


class RunControl(Protocol):
    """What a supervisor asks of the coordinator."""

    requests: deque[ManagementRequest]
    """What users have asked of this launcher."""

    @property
    def evicted(self) -> deque[tuple[MemberDescription, str]]:
        """Members whose processes may still be there, and why the others go on without them."""
        ...

    @property
    def held_up(self) -> tuple[HeldUp, ...]:
        """Ranks that others wait for."""
        ...

    @property
    def is_gone(self) -> bool:
        """Whether the run is over, because the process that serves it has ended."""
        ...

    def take_numbers(self, count: int) -> int:
        """Return the first of `count` numbers for workers, which nobody else gets."""
        ...

    def present(self) -> list[int]:
        """Ranks of the members that have neither left nor been lost."""
        ...

    def replaces_workers(self, yes: bool) -> None:
        """Say whether workers are about to come from this launcher."""
        ...

    def answer(self, asked: ManagementRequest, text: str, *, done: bool) -> None:
        """Answer one of `requests`."""
        ...

    def close(self) -> None:
        """End the service, or the connection to it."""
        ...
