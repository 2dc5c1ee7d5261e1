"""Who takes part, and which of them are gone."""

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
    """When a process started, in clock ticks since boot; -1 if it is gone or only waits to be reaped."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    return -1 if fields[0] in "ZX" else int(fields[19])


WATCH_SECONDS = 0.5
"""How often a rank that waits looks whether the others are still there."""


def wait_for_keys(store: Store, keys: list[str], seconds: float) -> bool:
    """Whether all `keys` come into the store within `seconds`. Asks, because the store's own wait complains aloud."""
    deadline, pause = time.monotonic() + seconds, 0.0005
    while not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return True


@dataclass(frozen=True)
class Peer:
    """One rank, as the others need to know it."""

    rank: int
    host: str
    host_id: str
    pid: int
    started: int

    @classmethod
    def me(cls, rank: int, host: str, host_id: str) -> "Peer":
        pid = os.getpid()
        return cls(rank, host, host_id, pid, start_time(pid))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Peer":
        return cls(**json.loads(text))


def loss_of(me: int, gone: dict[int, str]) -> RankLost:
    """The error for rank `me` to raise, naming those who are gone and how."""
    who = "; ".join(f"rank {rank} is gone: {how}" for rank, how in sorted(gone.items()))
    return RankLost(
        f"rank {me}: {who}. It failed (see its output), or it took fewer steps than this rank "
        "(tutti.data.shard gives all ranks the same number).",
        gone,
    )


class Membership:
    """The ranks of one generation, or some of them, and the store through which they met.

    `peers` are in the order of the ranks here; each peer's own `rank` is the one in the whole world, which is what
    messages name.
    """

    def __init__(self, rank: int, peers: Iterable[Peer], store: Store, timeout: timedelta) -> None:
        self.rank = rank
        self.peers = tuple(peers)
        self.store = store
        self.timeout = timeout
        self.more_time = "tutti.init(timeout=...), tutti run --timeout or TUTTI_TIMEOUT"
        """How to have longer."""

    @property
    def size(self) -> int:
        return len(self.peers)

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(peer.host_id for peer in self.peers)

    @property
    def one_host(self) -> bool:
        return len(set(self.hosts)) == 1

    @property
    def me(self) -> int:
        """This rank's number in the whole world."""
        return self.peers[self.rank].rank

    def subset(self, ranks: Sequence[int]) -> "Membership":
        """Some of these ranks, this one among them, in the order given."""
        assert self.rank in ranks, f"rank {self.rank} is not one of {ranks}"
        return Membership(ranks.index(self.rank), [self.peers[rank] for rank in ranks], self.store, self.timeout)

    def leave(self) -> None:
        """Tell the others that this rank is done and will answer no more."""
        self._mark("left")

    def gone(self) -> dict[int, str]:
        """Ranks that are gone, with how that is known; if any went of its own accord, only those."""
        found = {peer.rank: how for peer in self.peers if (how := self.how_gone(peer)) is not None}
        # Asked last: a rank says that it flees from another before it is seen to be gone.
        causes = {rank: how for rank, how in found.items() if not self._marked("fled", rank)}
        return causes or found

    def how_gone(self, peer: Peer) -> str | None:
        """How it is known that a peer is gone; None if it is here, or is this rank."""
        me = self.peers[self.rank]
        if peer is me:
            return None
        if peer.host_id == me.host_id and start_time(peer.pid) != peer.started:
            return f"its process {peer.pid} on {peer.host} has ended"
        return "it has left" if self._marked("left", peer.rank) else None

    def check_peer(self, rank: int) -> None:
        """Refuse to talk to nobody, or to oneself."""
        if not 0 <= rank < self.size or rank == self.rank:
            raise ConfigError(f"rank {self.me}: no peer {rank} in a world of {self.size}.")

    def loss(self, gone: dict[int, str], detail: str = "") -> RankLost:
        """The error for this rank to raise; the others will not blame this rank for leaving with it."""
        self._mark("fled")
        if not gone:
            return RankLost(f"rank {self.me}: lost contact with a peer ({detail}). See the other ranks' output.")
        return loss_of(self.me, gone)

    def explain(self, cause: Exception) -> RankLost | DeadlineExceeded:
        """Turn a transport's own failure into the error that names the rank that caused it."""
        deadline = time.monotonic() + 1.0
        # A dying peer's connections close a moment before its process is seen to have ended.
        while not (gone := self.gone()) and time.monotonic() < deadline:
            time.sleep(0.02)
        text = str(cause).splitlines()[0]
        if not gone and "imed out" in text:
            return self.overdue(f"a reply ({text})")
        return self.loss(gone, text)

    def overdue(self, what: str) -> DeadlineExceeded:
        self._mark("fled")
        return DeadlineExceeded(
            f"rank {self.me}: waited {self.timeout.total_seconds():g} s for {what}, and no rank is known to be "
            f"gone. If the work is just slow, give more: {self.more_time}."
        )

    def await_keys(self, keys: list[str], what: str, lost: Callable[[], dict[int, str]] | None = None) -> None:
        """Wait until all `keys` are in the store, watching that nobody is gone meanwhile, or whom `lost` names."""
        deadline = time.monotonic() + self.timeout.total_seconds()
        while not wait_for_keys(self.store, keys, WATCH_SECONDS):
            if gone := (lost or self.gone)():
                raise self.loss(gone)
            if time.monotonic() > deadline:
                raise self.overdue(what)

    def _mark(self, state: str) -> None:
        with suppress(DistError):  # The store goes with the launcher: then nobody is left to tell.
            self.store.set(f"{state}/{self.me}", "1")

    def _marked(self, state: str, rank: int) -> bool:
        try:
            return self.store.check([f"{state}/{rank}"])
        except DistError:
            return False


class ChannelMembership:
    """What ranks tell each other, through the store, about one conversation: who has closed it or given it up."""

    def __init__(self, membership: Membership, name: str) -> None:
        self.membership = membership
        self._name = f"{name}/over"

    def close(self) -> None:
        self._say("it has closed this conversation")

    def abort(self) -> None:
        """This rank has failed to get an answer: nobody should wait for it here."""
        self._say("it has given up this conversation, having waited for another rank in vain")

    def closed_meanwhile(self) -> RankLost:
        """The error for a wait of this rank that its own closing has ended."""
        return RankLost(f"rank {self.membership.me}: this conversation was closed while it waited for a peer.")

    def lost(self, rank: int) -> dict[int, str]:
        """Nobody, if `rank` may still answer here; otherwise whom to blame for that, and why."""
        peer = self.membership.peers[rank]
        why = self.membership.how_gone(peer) or self.said_by(rank)
        return {} if why is None else self.membership.gone() or {peer.rank: why}

    def lost_ranks(self) -> dict[int, str]:
        """Everyone who will not answer here any more."""
        others = [rank for rank in range(self.membership.size) if rank != self.membership.rank]
        return {who: why for rank in others for who, why in self.lost(rank).items()}

    def _say(self, what: str) -> None:
        with suppress(DistError):  # The store goes with the launcher: then nobody is left to tell.
            self.membership.store.set(f"{self._name}/{self.membership.rank}", what)

    def said_by(self, rank: int) -> str | None:
        """How a rank has ended its part in this conversation; None if it has not."""
        key = f"{self._name}/{rank}"
        try:
            return self.membership.store.get(key).decode() if self.membership.store.check([key]) else None
        except DistError:
            return None
