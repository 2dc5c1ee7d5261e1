"""Membership: which ranks take part, and which of them are gone.

How it works
------------
The ranks of one generation share a `torch.distributed` store. A `Membership` lists them as `Peer`s. A
`ChannelMembership` adds what they announce about one channel. Each rank writes only its own keys, and no key is ever
removed:

- `left/RANK`: this rank leaves the world and answers no more. Written on purpose (shutdown) by `leave`.
- `fled/RANK`: this rank stops because of another rank's failure. Written just before it raises its own error, so that
  the others do not report it as the cause when they see it go.
- `CHANNEL/over/RANK`: this rank has closed or aborted one channel, with the reason as text.

A rank is gone if its process has ended, which only ranks of the same host can see (`/proc`, with the start time, so
that a reused process id is not mistaken for it), or if its `left` key is there. A peer on another host that dies
without a word is noticed by its closed connection, which is the transport's task.

`gone` reads the `fled` keys last. A rank writes `fled` before it can be seen to be gone, so a rank found gone without
that key went by itself and is the cause. If all fled, all of them are reported.

Waits: `await_keys` polls the store. It ends when all keys are there, when a rank is found gone (`RankLost`), or after
`timeout` (`DeadlineExceeded`). The store may end with the launcher: its errors are taken as "nothing announced",
because no rank is left then that could read it.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import DistError, Store

from tutti.errors import ConfigError, DeadlineExceeded, RankLost


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot; -1 if it has ended, also if it is not reaped yet."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()  # The command before it may contain anything.
    except (FileNotFoundError, ProcessLookupError):
        return -1
    # A zombie has ended: its memory is gone, and it answers nothing.
    return -1 if fields[0] in "ZX" else int(fields[19])  # State (zombie, dead) and start time: see proc(5).


WATCH_SECONDS = 0.5
"""How often a waiting rank checks whether the ranks it waits for are still there."""

EXPLAIN_SECONDS = 1.0
"""How long to look for the cause of a broken connection: sockets close a little before the process is seen to end."""


def wait_for_keys(store: Store, keys: list[str], seconds: float) -> bool:
    """Whether all `keys` are in the store within `seconds`.

    It polls, because the store's own wait logs an error when it times out.
    """
    deadline, pause = time.monotonic() + seconds, 0.0005
    while not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        # Short at first, as ranks mostly arrive together; then longer, because each check is a request to the store.
        pause = min(2 * pause, 0.05)
    return True


@dataclass(frozen=True)
class Peer:
    """The identity of one rank, as the others know it."""

    rank: int
    """Its rank in the whole world, which error messages name."""
    host: str
    """The name of its host, for people."""
    host_id: str
    """Identifies its host: ranks with equal ids can share memory and see each other's processes."""
    pid: int
    """Its process id on that host."""
    started: int
    """The start time of that process, as `start_time` gives it."""

    @classmethod
    def this_process(cls, rank: int, host: str, host_id: str) -> "Peer":
        """Describe the calling process as `rank`."""
        pid = os.getpid()
        return cls(rank, host, host_id, pid, start_time(pid))

    def to_json(self) -> str:
        """Serialise for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Peer":
        """Parse what `to_json` returned."""
        return cls(**json.loads(text))


def rank_lost_error(world_rank: int, gone: dict[int, str]) -> RankLost:
    """The error for `world_rank` to raise. `gone` maps the lost ranks to how that is known."""
    who = "; ".join(f"rank {rank} is gone: {reason}" for rank, reason in sorted(gone.items()))
    return RankLost(
        f"rank {world_rank}: {who}. It failed (see its output), or it took fewer steps than this rank "
        "(tutti.shard gives all ranks the same number).",
        gone,
    )


class Membership:
    """The ranks of one generation, or some of them, and the store they share.

    `peers` are in the order of the ranks here; `Peer.rank` is the rank in the whole world.
    """

    def __init__(self, rank: int, peers: Iterable[Peer], store: Store, timeout: timedelta) -> None:
        """Describe a group of `peers`, of which this process is number `rank`; `timeout` limits every wait."""
        self.rank = rank
        self.peers = tuple(peers)
        self.store = store
        self.timeout = timeout
        self.timeout_hint = "tutti.init(timeout=...), tutti run --timeout or TUTTI_TIMEOUT"
        """Where the user can set a longer timeout, for error messages."""

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
        # The same store: `left` and `fled` are keyed by world rank, so every subset sees them.
        return Membership(ranks.index(self.rank), [self.peers[rank] for rank in ranks], self.store, self.timeout)

    def leave(self) -> None:
        """Announce that this rank is done and answers no more."""
        self._mark("left")

    def gone(self) -> dict[int, str]:
        """World ranks that are gone, with how that is known; only the causes, if some went because of others."""
        gone = {peer.rank: reason for peer in self.peers if (reason := self.reason_gone(peer)) is not None}
        # Read last: a rank writes that it flees from another before it can be seen to be gone.
        # What remains are ranks that went by themselves. The others only followed, and naming them would mislead.
        causes = {rank: reason for rank, reason in gone.items() if not self._marked("fled", rank)}
        return causes or gone

    def reason_gone(self, peer: Peer) -> str | None:
        """How it is known that a peer is gone; None if it is here, or is this rank."""
        me = self.peers[self.rank]
        if peer is me:
            return None
        # Another start time: the process has ended, and its id was given to a new one.
        # Only processes of the same host are in this host's /proc.
        if peer.host_id == me.host_id and start_time(peer.pid) != peer.started:
            return f"its process {peer.pid} on {peer.host} has ended"
        return "it has left" if self._marked("left", peer.rank) else None

    def check_peer(self, rank: int) -> None:
        """Raise `ConfigError` unless `rank` is another rank of this group."""
        if not 0 <= rank < self.size or rank == self.rank:
            raise ConfigError(f"rank {self.world_rank}: no peer {rank} in a world of {self.size}.")

    def loss_error(self, gone: dict[int, str], detail: str = "") -> RankLost:
        """The error for this rank to raise because ranks are `gone`. Marks this rank as fled."""
        self._mark("fled")
        if not gone:
            return RankLost(
                f"rank {self.world_rank}: lost contact with a peer ({detail}). See the other ranks' output."
            )
        return rank_lost_error(self.world_rank, gone)

    def explain_error(self, cause: Exception) -> RankLost | DeadlineExceeded:
        """Turn a failure of Gloo, MPI or the operating system into the error that names the rank that caused it."""
        # A peer's sockets are closed by the kernel a moment before its process is seen to have ended.
        deadline = time.monotonic() + EXPLAIN_SECONDS
        while not (gone := self.gone()) and time.monotonic() < deadline:
            time.sleep(0.02)
        text = next(iter(str(cause).splitlines()), type(cause).__name__)
        # Matches "Timed out" and "timed out": libraries spell it differently.
        if not gone and "imed out" in text:
            return self.timeout_error(f"a reply ({text})")
        return self.loss_error(gone, text)

    def timeout_error(self, awaited: str) -> DeadlineExceeded:
        """The error for this rank to raise after it has waited for `awaited` too long. Marks this rank as fled."""
        self._mark("fled")
        return DeadlineExceeded(
            f"rank {self.world_rank}: waited {self.timeout.total_seconds():g} s for {awaited}, and no rank is known to "
            f"be gone. If the work is just slow, give more: {self.timeout_hint}."
        )

    def await_keys(self, keys: list[str], awaited: str, lost: Callable[[], dict[int, str]] | None = None) -> None:
        """Wait until all `keys` are in the store.

        Args:
            awaited: what is waited for, for the timeout error.
            lost: returns the ranks whose loss ends the wait, instead of `gone`.
        """
        deadline = time.monotonic() + self.timeout.total_seconds()
        while not wait_for_keys(self.store, keys, WATCH_SECONDS):
            # Before the deadline is looked at: an error that names the lost rank helps more than a timeout.
            if gone := (lost or self.gone)():
                raise self.loss_error(gone)
            if time.monotonic() > deadline:
                raise self.timeout_error(awaited)

    def _mark(self, state: str) -> None:
        with suppress(DistError):  # The store ends with the launcher: then no rank is left to read it.
            self.store.set(f"{state}/{self.world_rank}", "1")

    def _marked(self, state: str, rank: int) -> bool:
        try:
            return self.store.check([f"{state}/{rank}"])
        except DistError:
            return False


class ChannelMembership:
    """The ranks of one channel: which have closed it, and which have aborted it."""

    def __init__(self, membership: Membership, name: str) -> None:
        """Watch the channel called `name`, which must be unique in the store."""
        self.membership = membership
        self._prefix = f"{name}/over"

    def close(self) -> None:
        """Announce that this rank has closed the channel."""
        self._announce("it has closed this channel")

    def abort(self) -> None:
        """Announce that this rank has failed to get an answer, so that no rank waits for it here."""
        self._announce("it has given up this channel, having waited for another rank in vain")

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
        # By the rank in this channel: the prefix already names the channel.
        key = f"{self._prefix}/{rank}"
        try:
            return self.membership.store.get(key).decode() if self.membership.store.check([key]) else None
        except DistError:
            return None

    def _announce(self, reason: str) -> None:
        with suppress(DistError):  # The store ends with the launcher: then no rank is left to read it.
            self.membership.store.set(f"{self._prefix}/{self.membership.rank}", reason)
