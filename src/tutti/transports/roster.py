"""Who takes part, and which of them are gone."""

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import DistError, Store

from tutti.errors import DeadlineExceeded, RankLost


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot; -1 if it is gone or only waits to be reaped."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    return -1 if fields[0] in "ZX" else int(fields[19])


_WATCH_SECONDS = 0.5
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


class Roster:
    """The ranks of one generation, or some of them, and the store through which they met.

    `peers` are in the order of the ranks here; each peer's own `rank` is the one in the whole world, which is what
    messages name.
    """

    def __init__(self, rank: int, peers: Iterable[Peer], store: Store, timeout: timedelta) -> None:
        self.rank = rank
        self.peers = tuple(peers)
        self.store = store
        self.timeout = timeout

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

    def subset(self, ranks: Sequence[int]) -> "Roster":
        """Some of these ranks, this one among them, in the order given."""
        assert self.rank in ranks, f"rank {self.rank} is not one of {ranks}"
        return Roster(ranks.index(self.rank), [self.peers[rank] for rank in ranks], self.store, self.timeout)

    def leave(self) -> None:
        """Tell the others that this rank is done and will answer no more."""
        self._mark("left")

    def gone(self) -> dict[int, str]:
        """Ranks that are gone, with how that is known; if any went of its own accord, only those."""
        me = self.peers[self.rank]
        found = {}
        for peer in self.peers:
            if peer is me:
                continue
            if peer.host_id == me.host_id and start_time(peer.pid) != peer.started:
                found[peer.rank] = f"its process {peer.pid} on {peer.host} has ended"
            elif self._marked("left", peer.rank):
                found[peer.rank] = "it has left"
        # Asked last: a rank says that it flees from another before it is seen to be gone.
        causes = {rank: how for rank, how in found.items() if not self._marked("fled", rank)}
        return causes or found

    def check(self, rank: int | None = None) -> None:
        """Raise `RankLost` if `rank` is gone or has given up; without a rank, if anyone is gone."""
        gone = self.gone()
        if rank is None:
            if gone:
                raise self.loss(gone)
        elif (other := self.peers[rank].rank) in gone or self._marked("left", other) or self._marked("fled", other):
            raise self.loss(gone, f"rank {other} has given up")

    def loss(self, gone: dict[int, str], detail: str = "") -> RankLost:
        """The error for this rank to raise; the others will not blame this rank for leaving with it."""
        self._mark("fled")
        if not gone:
            return RankLost(f"rank {self.me}: lost contact with a peer ({detail}). See the other ranks' output.")
        who = "; ".join(f"rank {rank} is gone: {how}" for rank, how in sorted(gone.items()))
        return RankLost(
            f"rank {self.me}: {who}. It failed (see its output), or it took fewer steps than this rank "
            "(tutti.shard gives all ranks the same number)."
        )

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
            "gone. If the work is just slow, give more: tutti.init(timeout=...), tutti run --timeout or TUTTI_TIMEOUT."
        )

    def await_keys(self, keys: list[str], what: str, also: Callable[[], dict[int, str]] = dict) -> None:
        """Wait until all `keys` are in the store, watching that nobody dies meanwhile, or is gone as `also` says."""
        deadline = time.monotonic() + self.timeout.total_seconds()
        while not wait_for_keys(self.store, keys, _WATCH_SECONDS):
            if gone := self.gone() or also():
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
