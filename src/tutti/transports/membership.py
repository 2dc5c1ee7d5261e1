"""Membership: which ranks take part, and which of them are gone.

How it works
------------
The ranks of one world or group are members of a job, which meet in a scope of its coordinator (`tutti.coordination`). A
`Membership` lists them as `Peer`s. A `ChannelMembership` adds what they announce about one channel. What a rank
announces, it announces to all:

- left: this rank leaves the world and answers no more. On purpose (shutdown), by `leave`.
- fled: this rank stops because of another rank's failure. Just before it raises its own error, so that the others do
  not report it as the cause when they see it go.
- closed, aborted: this rank's part in one channel is over.

A rank is gone if the coordinator has told so (its process has ended, or was silent for too long), or if it has left.
While there is no coordinator, ranks of the same host are looked at in `/proc`. Nothing here asks over the network: what
the coordinator tells is kept by the `Member`.

The coordinator tells of a loss after everything that the lost rank announced. So a rank that is gone and has not fled
went by itself and is the cause. If all fled, all of them are reported.

Waits: `await_values` ends when all values are there, when a rank is found gone (`RankLost`), when this process is
excluded from the job (`RankLost`), or after `timeout` (`DeadlineExceeded`).
"""

import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta

from tutti.cluster.hosts import LOOPBACK
from tutti.coordination import Member, MemberDescription
from tutti.coordination.activity import Wait
from tutti.coordination.description import process_state
from tutti.coordination.knowledge import LEFT
from tutti.errors import ConfigError, DeadlineExceeded, RankLost

WATCH_SECONDS = 0.5
"""How often a waiting rank checks whether the ranks it waits for are still there, beside when it is told."""

EXPLAIN_SECONDS = 1.0
"""How long to look for the cause of a broken connection: sockets close a little before the process is seen to end."""

_FLEE_SECONDS = 0.5
"""How long a rank that fails because of another waits until the others are told so."""


@dataclass(frozen=True)
class Peer:
    """The identity of one rank, as the others know it."""

    rank: int
    """Its rank in the whole world, which error messages name."""
    process: MemberDescription
    """Its process."""

    @classmethod
    def this_process(cls, rank: int, host: str, host_id: str) -> "Peer":
        """Describe the calling process as `rank`."""
        return cls(rank, MemberDescription.this_process(rank, host, host_id))

    @property
    def host(self) -> str:
        """The name of its host, for people."""
        return self.process.host

    @property
    def host_id(self) -> str:
        """Identifies its host: ranks with equal ids can share memory and see each other's processes."""
        return self.process.host_id


def rank_lost_error(world_rank: int, gone: dict[int, str]) -> RankLost:
    """The error for `world_rank` to raise. `gone` maps the lost ranks to how that is known."""
    who = "; ".join(f"rank {rank} is gone: {reason}" for rank, reason in sorted(gone.items()))
    # A rank that was evicted had no say in it.
    advice = (
        "It failed (see its output), or it took fewer steps than this rank "
        "(tutti.shard gives all ranks the same number)."
    )
    evicted = all("was silent" in reason or "not connected again" in reason for reason in gone.values())
    return RankLost(f"rank {world_rank}: {who}.{'' if evicted else ' ' + advice}", gone)


class Membership:
    """The ranks of one world or group, or some of them, and the scope they share.

    `peers` are in the order of the ranks here; `Peer.rank` is the rank in the whole world.
    """

    def __init__(self, rank: int, peers: Iterable[Peer], member: Member, scope: str, timeout: timedelta) -> None:
        """Describe a group of `peers`, of which this process is number `rank`; `timeout` limits every wait."""
        self.rank = rank
        self.peers = tuple(peers)
        self.member = member
        self.scope = scope
        self.timeout = timeout
        self.timeout_hint = "tutti.init(timeout=...), tutti run --timeout or TUTTI_TIMEOUT"
        """Where the user can set a longer timeout, for error messages."""
        self.address = LOOPBACK
        """An address of this host on which this rank's sockets listen."""
        self.num_in_scope = len(self.peers)
        """Number of ranks in the scope, of which these may be some."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.peers)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host id of each rank."""
        return tuple(peer.host_id for peer in self.peers)

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on the same host."""
        return len(set(self.hosts)) == 1

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """The number of each rank in the whole world."""
        return tuple(peer.rank for peer in self.peers)

    @property
    def world_rank(self) -> int:
        """This rank's number in the whole world."""
        return self.peers[self.rank].rank

    def subset(self, ranks: Sequence[int]) -> "Membership":
        """The membership of some of these ranks, this one among them, in the order given."""
        assert self.rank in ranks, f"rank {self.rank} is not one of {ranks}"
        # The same scope: what a rank announces there, every subset sees.
        peers = [self.peers[rank] for rank in ranks]
        made = Membership(ranks.index(self.rank), peers, self.member, self.scope, self.timeout)
        made.timeout_hint, made.num_in_scope, made.address = self.timeout_hint, self.num_in_scope, self.address
        return made

    # Ranks that are gone

    def leave(self) -> None:
        """Announce that this rank is done and answers no more."""
        self.member.notice(self.scope, "left", LEFT, self.num_in_scope)

    def gone(self) -> dict[int, str]:
        """World ranks that are gone, with how that is known; only the causes, if some went because of others."""
        gone = {peer: reason for peer in self.peers if (reason := self.reason_gone(peer)) is not None}
        # What remains are ranks that went by themselves. The others only followed, and naming them would mislead.
        causes = {peer.rank: reason for peer, reason in gone.items() if not self._notice(peer, "fled")}
        return causes or {peer.rank: reason for peer, reason in gone.items()}

    def reason_gone(self, peer: Peer) -> str | None:
        """How it is known that a peer is gone; None if it is here, or is this rank."""
        me, process = self.peers[self.rank].process, peer.process
        if process.id == me.id:
            return None
        if (reason := self.member.known.lost.get(process.id) or self._notice(peer, "left")) is not None:
            return reason
        # Nobody tells while the coordinator is away. Only processes of the same host are in this host's /proc.
        visible = not self.member.connected and process.host_id == me.host_id
        if visible and process_state(process.pid, process.started) == "ended":
            return f"its process {process.pid} on {process.host} has ended"
        return None

    def _notice(self, peer: Peer, kind: str) -> str | None:
        return self.member.known.notices(self.scope, peer.process.id).get(kind)

    def check_peer(self, rank: int) -> None:
        """Raise `ConfigError` unless `rank` is another rank of this group."""
        if not 0 <= rank < self.size or rank == self.rank:
            raise ConfigError(f"rank {self.world_rank}: no peer {rank} in a world of {self.size}.")

    # Errors

    def loss_error(self, gone: dict[int, str], detail: str = "") -> RankLost:
        """The error for this rank to raise because ranks are `gone`. Announces that this rank has fled."""
        self._flee()
        if not gone:
            return RankLost(
                f"rank {self.world_rank}: lost contact with a peer ({detail}). See the other ranks' output."
            )
        return rank_lost_error(self.world_rank, gone)

    def explain_error(self, cause: Exception, peer: int | None = None) -> RankLost | DeadlineExceeded:
        """Turn a failure of Gloo, MPI or the operating system into the error that names the rank that caused it.

        Args:
            peer: the rank that the failed connection is with, which is named if nobody knows more.
        """
        # A peer's sockets are closed by the kernel a moment before its process is seen to have ended.
        deadline = time.monotonic() + EXPLAIN_SECONDS
        while not (gone := self.gone()) and time.monotonic() < deadline:
            time.sleep(0.02)
        text = next(iter(str(cause).splitlines()), type(cause).__name__)
        # Matches "Timed out" and "timed out": libraries spell it differently.
        if not gone and "imed out" in text:
            return self.timeout_error(f"a reply ({text})")
        if not gone and peer is not None:
            gone = {self.peers[peer].rank: f"its connection failed: {text}"}
        return self.loss_error(gone, text)

    def timeout_error(self, awaited: str) -> DeadlineExceeded:
        """The error for this rank to raise after it has waited for `awaited` too long. Announces that it has fled."""
        self._flee()
        return DeadlineExceeded(
            f"rank {self.world_rank}: waited {self.timeout.total_seconds():g} s for {awaited}, and no rank is known to "
            f"be gone. If the work is just slow, give more: {self.timeout_hint}."
        )

    def _flee(self) -> None:
        self.member.notice(self.scope, "fled", "it stopped because of another rank", self.num_in_scope)
        # The process may end at once after this, and what it has not sent by then would be lost with it.
        if self.member.connected:
            with suppress(RankLost, DeadlineExceeded):  # This process was excluded: then nobody waits for it.
                self.member.sync(_FLEE_SECONDS)

    # Values

    def set(self, key: str, value: str) -> None:
        """Set a value of this rank's, which the other ranks can wait for."""
        self.member.set(f"{self.scope}/{key}", value)

    def await_values(
        self,
        keys: list[str],
        awaited: str,
        lost: Callable[[], dict[int, str]] | None = None,
        owner: int | None = None,
    ) -> list[str]:
        """Wait until all values are set, and return them.

        Args:
            awaited: what is waited for, for the timeout error.
            lost: returns the ranks whose loss ends the wait, instead of `gone`.
            owner: the rank that sets them, where it is one alone.
        """

        def check() -> None:
            if gone := (lost or self.gone)():
                raise self.loss_error(gone)

        paths = [f"{self.scope}/{key}" for key in keys]
        # Some of the others may have set theirs already, and wait too. So only if all are stuck, this one is.
        with waiting_for(self, -1 if owner is None else owner, f"come: this rank waits for {awaited}"):
            values = self.member.values(paths, self.timeout.total_seconds(), check)
        if values is None:
            raise self.timeout_error(awaited)
        return values

    def decide(self, key: str, value: str, awaited: str) -> str:
        """Propose a value; return the one that was proposed first, which is the same on all ranks."""
        self.member.propose(f"{self.scope}/{key}", value)
        return self.await_values([key], awaited, lost=dict)[0]


def is_excluded(membership: Membership, rank: int) -> bool:
    """Whether the job goes on without a rank that has not left by itself: it may take no more part."""
    known, member = membership.member.known, membership.peers[rank].process.id
    return known.lost.get(member) not in (None, LEFT) and "left" not in known.notices(membership.scope, member)


def address_family(address: str) -> socket.AddressFamily:
    """The family of sockets that listen on an address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def waiting_for(
    membership: Membership, peer: int, action: str, *, observed: bool = True
) -> AbstractContextManager[Wait]:
    """Report that this thread waits for a rank of the membership to do something; for any of them if it is negative."""
    # By the number that the launcher gave each process, as the coordinator knows it: a group may have other numbers.
    numbers = [peer.process.rank for peer in membership.peers]
    if peer >= 0:
        return membership.member.activity.waiting([numbers[peer]], action, observed=observed)
    others = [number for rank, number in enumerate(numbers) if rank != membership.rank]
    return membership.member.activity.waiting(others, action, any_of=True, observed=observed)


class ChannelMembership:
    """The ranks of one channel: which have closed it, and which have aborted it."""

    def __init__(self, membership: Membership, name: str) -> None:
        """Watch the channel called `name`, which must be unique in the scope."""
        self.membership = membership
        self._scope = f"{membership.scope}/{name}"

    def close(self) -> None:
        """Announce that this rank has closed the channel."""
        self._announce("closed", "it has closed this channel")

    def abort(self) -> None:
        """Announce that this rank has failed to get an answer, so that no rank waits for it here."""
        self._announce("aborted", "it has given up this channel, having waited for another rank in vain")

    def closed_error(self) -> RankLost:
        """The error for a wait of this rank that ended because this rank closed the channel."""
        return RankLost(f"rank {self.membership.world_rank}: this channel was closed while it waited for a peer.")

    def lost(self, rank: int) -> dict[int, str]:
        """Empty if `rank` may still answer here; otherwise the world ranks to blame, and why."""
        peer = self.membership.peers[rank]
        reason = self.membership.reason_gone(peer) or self.reason_left(rank)
        # A rank that only closed the channel may have done so because another one is gone: that one is named instead.
        return {} if reason is None else self.membership.gone() or {peer.rank: reason}

    def lost_ranks(self) -> dict[int, str]:
        """All world ranks that will not answer here any more, and why."""
        others = [rank for rank in range(self.membership.size) if rank != self.membership.rank]
        return {world_rank: reason for rank in others for world_rank, reason in self.lost(rank).items()}

    def reason_left(self, rank: int) -> str | None:
        """How a rank has ended its part in this channel; None if it has not."""
        notices = self.membership.member.known.notices(self._scope, self.membership.peers[rank].process.id)
        return notices.get("aborted") or notices.get("closed")

    def _announce(self, kind: str, reason: str) -> None:
        membership = self.membership
        # So that the channel is forgotten when the others have closed it, also if one of its ranks is lost.
        some = [peer.process.id for peer in membership.peers] if membership.size < membership.num_in_scope else []
        membership.member.notice(self._scope, kind, reason, membership.size, some)
