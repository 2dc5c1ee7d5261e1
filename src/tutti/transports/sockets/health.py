"""Whether a channel can continue on this rank, and the errors for when it cannot."""

import time

from tutti.errors import ConfigError, DeadlineExceeded, RankLost
from tutti.transports.base import ANY
from tutti.transports.membership import EXPLAIN_SECONDS, ChannelMembership, Membership, rank_lost_error


class ChannelHealth:
    """This rank's state in one channel. `interrupted` may be set by any thread, and is never unset."""

    def __init__(self, membership: Membership, name: str) -> None:
        self.membership = membership
        self.channel_membership = ChannelMembership(membership, name)
        self.interrupted = False
        """Whether this rank is closing the channel: every wait ends."""
        self.tolerates_loss = False
        """Whether spawned operations use the channel. Each of them handles the loss of its own peer, so the loss of
        one does not end the channel for the others."""
        self.failures: dict[int, str] = {}
        """Why a connection with a peer failed, where that was seen on the connection itself."""

    def check_open(self) -> None:
        """Raise `ConfigError` if the channel is closed here."""
        if self.interrupted:
            raise ConfigError(f"rank {self.membership.world_rank}: this transport is closed.")

    def check_not_interrupted(self) -> None:
        """End the present wait with `RankLost` if the channel was closed here meanwhile."""
        if self.interrupted:
            raise self.channel_membership.closed_error()
        self.membership.member.check()

    def lost(self, peer: int) -> dict[int, str]:
        """The world ranks to blame if `peer` will not answer, else empty; `ANY` is lost when all ranks are."""
        if peer != ANY:
            return self.channel_membership.lost(peer)
        others = [rank for rank in range(self.membership.size) if rank != self.membership.rank]
        lost = [self.channel_membership.lost(rank) for rank in others]
        return {world_rank: reason for gone in lost for world_rank, reason in gone.items()} if all(lost) else {}

    def connection_error(self, peer: int, cause: OSError | None = None) -> RankLost:
        """The error for a connection with `peer` that is closed or could not be opened. Aborts the channel."""
        deadline = time.monotonic() + EXPLAIN_SECONDS
        # The connection closes a moment before the peer's process is seen to end, or its announcement comes.
        while not (lost := self.channel_membership.lost(peer)) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.abort()
        if not lost:
            # Nobody else knows why. It is this peer all the same: the connection is with no other.
            reason = self.failures.get(peer) or f"its connection failed: {cause or 'it was closed'}"
            lost = {self.membership.peers[peer].rank: reason}
        return self.membership.loss_error(lost)

    def operation_error(self, peer: int) -> RankLost:
        """The error for one spawned operation that depends on `peer`, which is lost. The channel continues."""
        # This peer alone, and not the cause of its loss: other operations go on with the other ranks.
        lost = self.membership.peers[peer]
        reason = self.membership.reason_gone(lost) or self.channel_membership.reason_left(peer)
        reason = reason or self.failures.get(peer)
        return rank_lost_error(self.membership.world_rank, {lost.rank: reason or "its connection is closed"})

    def timeout_error(self, awaited: str) -> DeadlineExceeded:
        """The error for a wait that lasted too long. Aborts the channel, so that no rank waits for this one."""
        self.channel_membership.abort()
        return self.membership.timeout_error(awaited)

    def abort(self) -> None:
        """Announce that this rank does not continue here, unless it continues without the peer it lost."""
        if not self.tolerates_loss:
            self.channel_membership.abort()
