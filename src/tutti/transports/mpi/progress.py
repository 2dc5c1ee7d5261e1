"""The progress engine of spawned operations over MPI: it tests their requests again and again."""

import threading
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from tutti.coordination.activity import Wait
from tutti.errors import DeadlineExceeded, TuttiError
from tutti.transports.base import Work
from tutti.transports.event_loop import ProgressEngine
from tutti.transports.membership import WATCH_SECONDS, rank_lost_error, waiting_for
from tutti.transports.mpi.works import LONGEST_PAUSE_SECONDS, MpiMessage

if TYPE_CHECKING:
    from tutti.transports.mpi.transport import MpiTransport


class MpiProgressEngine(ProgressEngine):
    """Polls MPI, with pauses that double while nothing happens.

    MPI has no file descriptor to sleep on, so `idle` sleeps for a moment and lets the event loop test every request.
    Only the thread of the event loop uses this, except for `wake`.
    """

    def __init__(self, transport: "MpiTransport") -> None:
        self._transport = transport
        self._woken = threading.Event()
        self._pause_s = 0.0
        self._checked_at = time.monotonic()
        self._lost: dict[int, str] = {}  # World ranks that will not answer, as of the last check.

    def idle(self, seconds: float = WATCH_SECONDS) -> None:
        # 10 µs after the last message, then twice as long each time.
        self._pause_s = min(2 * self._pause_s + 0.00001, LONGEST_PAUSE_SECONDS, seconds)
        # A new operation or the closing of the loop ends the pause; messages of MPI cannot.
        if self._woken.wait(self._pause_s):
            self._woken.clear()
            self._pause_s = 0.0
        if time.monotonic() > self._checked_at + WATCH_SECONDS:
            self._checked_at = time.monotonic()
            self._lost = self._transport.channel_membership.lost_ranks()

    def wake(self) -> None:
        self._woken.set()

    def over(self, work: Work) -> bool:
        if work.done():
            self._pause_s = 0.0
            return True
        return isinstance(work, MpiMessage) and self._is_peer_lost(work)

    def failure(self, work: Work) -> Exception | None:
        # `over` was true because the peer is lost.
        if not work.done():
            return rank_lost_error(self._transport.membership.world_rank, self._lost)
        try:
            work.wait()
        except TuttiError as error:
            return error
        return None

    def timeout_error(self, awaited: str) -> DeadlineExceeded:
        return self._transport.membership.timeout_error(awaited)

    def waiting(self, work: Work | None) -> AbstractContextManager[Wait]:
        one = isinstance(work, MpiMessage) and not work.any_peer
        peer = work.peers[0] if one else -1  # type: ignore[union-attr]
        return waiting_for(self._transport.membership, peer, "reply over MPI", observed=False)

    def check(self, work: Work | None, wait: Wait) -> None:
        self._transport.membership.member.check()

    def _is_peer_lost(self, work: MpiMessage) -> bool:
        # A receive from any source goes on: another rank may still send.
        return not work.any_peer and self._transport.membership.peers[work.peers[0]].rank in self._lost
