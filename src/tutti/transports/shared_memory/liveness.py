"""Waiting for counters in shared memory while watching that the ranks that write them are alive."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from tutti.errors import DeadlineExceeded, RankLost
from tutti.transports.membership import ChannelMembership, Membership
from tutti.transports.shared_memory.counters import RankCounters
from tutti.transports.shared_memory.flags import Flags
from tutti.transports.sockets.transport import SocketTransport

CHECK_SECONDS = 0.1
"""How often a waiting rank checks whether the ranks it waits for are still there."""

_EXPLAIN_SECONDS = 0.3
"""How long to wait for the coordinator's word, before a rank is blamed that closed the channel."""

_CLOSED = "it has closed this channel"


class ChannelLiveness:
    """Which ranks of one shared-memory channel may still answer; waits that end when they will not.

    A rank is lost here if it is lost to the job, if it left the world, if it announced that it closed or aborted the
    channel, or if it set its `closed` counter. A rank may do its part and leave at once. So a wait first
    looks for lost ranks and then once more at the counters, and fails only if they still lack the value.
    """

    def __init__(self, inner: SocketTransport, counters: RankCounters) -> None:
        """Watch the ranks of `inner`, whose channel this one shares."""
        self._inner, self._counters = inner, counters
        self._membership: Membership = inner.membership
        self._channel_membership: ChannelMembership = inner.channel_membership
        self._timeout_s = inner.timeout.total_seconds()
        self.closed = False
        """Whether this rank has closed the channel."""

    def check_open(self) -> None:
        """End the present wait with `RankLost` if the channel was closed here meanwhile."""
        if self.closed or self._inner.closed:
            raise self._channel_membership.closed_error()
        self._membership.member.check()

    def missing(self) -> dict[int, str]:
        """Ranks of this channel (not world ranks) that will answer here no more, and how that is known."""
        ranks = range(self._membership.size)
        missing = {rank: reason for rank in ranks if (reason := self._reason_gone(rank)) is not None}
        # The counter is set before it is announced, so a rank that is just closing is found only here.
        closed = {rank: _CLOSED for rank in self._counters.closed_ranks() if rank != self._membership.rank}
        return missing | closed

    def await_reductions(self, slots: np.ndarray, value: int) -> None:
        """Wait until all `slots`, one per rank, hold `value`. Reported progress restarts the deadline."""
        # The usual case first: it touches neither the clock nor the membership.
        if self._counters.flags.wait(slots, value, CHECK_SECONDS):
            return

        def gone(late: list[int]) -> dict[int, str]:
            # The first question that finds a rank decides: a lost rank explains more than a closed channel.
            return self._membership.gone() or self._closed_world_ranks() or self._channel_membership.lost_ranks()

        ranks, action = range(self._membership.size), f"take part in all-reduce {value - 1}"
        self._watch(self._counters.flags, (slots, value), ranks, action, gone)

    def await_counters(self, flags: Flags, slots: np.ndarray, value: int, ranks: Sequence[int], action: str) -> None:
        """Wait until all `slots` hold `value`, which `ranks` write, one each.

        Only the loss of a rank that is late ends the wait. `action` says what the ranks should do, for the error.
        """
        if flags.wait(slots, value, CHECK_SECONDS):
            return

        def gone(late: list[int]) -> dict[int, str]:
            reasons = {self._membership.peers[rank].rank: self._reason_gone(rank) for rank in late}
            lost = {world_rank: reason for world_rank, reason in reasons.items() if reason is not None}
            return lost and (self._membership.gone() or lost)

        self._watch(flags, (slots, value), ranks, action, gone)

    def _watch(
        self,
        flags: Flags,
        awaited: tuple[np.ndarray, int],
        ranks: Sequence[int],
        action: str,
        gone: Callable[[list[int]], dict[int, str]],
    ) -> None:
        """Wait until all slots of `awaited` hold its value; raise when they will not, as `gone` tells of late ranks."""
        slots, value = awaited
        deadline, progress = time.monotonic() + self._timeout_s, self._counters.progress()
        with self._membership.member.activity.waiting((), action) as wait:
            while True:
                self.check_open()
                # `slots[i]` is written by `ranks[i]`.
                late = [ranks[index] for index in np.flatnonzero(flags.counters[slots] < value).tolist()]
                # As the coordinator numbers them; the numbers of a group may be others.
                wait.ranks = [self._membership.peers[rank].process.rank for rank in late]
                if (lost := gone(late)) and not flags.reached(slots, value):  # It may have gone after doing its part.
                    raise self._membership.loss_error(self._causes(lost))
                if progress != self._counters.progress():  # A rank waits for other hosts, and data comes from them.
                    deadline, progress = time.monotonic() + self._timeout_s, self._counters.progress()
                    wait.moved()
                elif time.monotonic() > deadline:
                    names = ", ".join(map(str, self._world_ranks(late)))
                    raise self._membership.timeout_error(f"rank {names} to {action}")
                if flags.wait(slots, value, CHECK_SECONDS):
                    return

    def _causes(self, lost: dict[int, str]) -> dict[int, str]:
        """The ranks to blame for ranks that closed the channel, who may have heard of a loss before this one did."""
        if not self._membership.gone():
            with suppress(RankLost, DeadlineExceeded):
                # The coordinator told them and this rank at the same time, so it is on its way.
                self._membership.member.sync(_EXPLAIN_SECONDS)
        return self._membership.gone() or lost

    def _reason_gone(self, rank: int) -> str | None:
        """How it is known that a rank will answer here no more; None if it may."""
        if rank == self._membership.rank:
            return None
        return self._membership.reason_gone(self._membership.peers[rank]) or self._channel_membership.reason_left(rank)

    def _closed_world_ranks(self) -> dict[int, str]:
        closed = self._world_ranks(self._counters.closed_ranks())
        return {rank: _CLOSED for rank in closed if rank != self._membership.world_rank}

    def _world_ranks(self, ranks: list[int]) -> list[int]:
        return [self._membership.peers[rank].rank for rank in ranks]
