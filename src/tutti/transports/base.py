"""The transport interface: how strategies and collectives move tensors between ranks.

How it works
------------
A transport joins a fixed set of ranks. `isend` and `irecv` start a message and return a `Work`; nothing blocks until
`Work.wait` is called. A message is matched by source, destination and tag, and messages of one (source, tag)
arrive in the order in which they were sent.

Collectives are written as generators (`Operation`). An operation yields each `Work` it depends on and is resumed when
that work is over. So the same text of an algorithm runs in three places:

- in the calling thread: `for work in operation: work.wait()`;
- in the background: `Transport.start` runs operations one after the other, `Transport.spawn` runs them concurrently;
- in virtual time: the simulator resumes the generator when its modelled clock reaches the end of the work.

If a yielded work fails, its error is raised inside the generator at that `yield`. An operation that catches the error
continues; otherwise the operation ends with that error, and `wait` on its own `Work` raises it.

Threads: one thread at a time uses a transport. Once `start` or `spawn` was called, the operations own the transport,
and a caller that wants to send or receive concurrently opens a `channel`. Only `interrupt` may be called from any
thread.

Waits: every wait ends when the work is over, when a peer it depends on is gone (`RankLost`), after `timeout`
(`DeadlineExceeded`), or when this rank closes the transport. No transport waits without a deadline unless it was
asked to.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Self

from torch import Tensor

from tutti.cluster import Cluster
from tutti.coordination.activity import Activity

ANY = -1
"""As a source: receive from the rank whose message arrives first."""

DEFAULT_TIMEOUT = timedelta(minutes=5)
"""How long ranks wait at the start for the others, unless the caller sets another."""

NO_LIMIT = timedelta(days=3650)
"""The timeout of transports whose waits end by what the coordinator knows, and not by a clock: a peer is lost, or ranks
wait for each other. Ten years, because some functions of the standard library take no more."""


class Work(ABC):
    """A communication that is in progress. It may be abandoned only when the transport is closed."""

    __slots__ = ()

    @abstractmethod
    def done(self) -> bool:
        """Whether `wait` would return at once. Never blocks; may make progress on the work."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the work is complete.

        Raises `RankLost` if a peer is gone and `DeadlineExceeded` after the transport's timeout.
        """

    @property
    def source(self) -> int:
        """The rank from which a completed receive came."""
        raise AssertionError(f"{type(self).__name__} is not a receive")


class CompletedWork(Work):
    """Work that was complete when it was returned."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class Signal(Work):
    """Work that is done once `set` was called. Spawned operations of one transport synchronise by yielding it."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """Mark the signal as done. The operations that wait for it continue."""
        self._is_set = True

    def done(self) -> bool:
        return self._is_set

    def wait(self) -> None:
        # Blocking here would deadlock: the thread that would call `set` is the one that runs all operations.
        assert self._is_set, "a signal can only be yielded by an operation, not waited for by a thread"


Operation = Generator[Work, None, None]
"""A generator that yields the work it waits for. See "How it works" above."""


class Transport(ABC):
    """Moves tensors between ranks. It is passed to the code that needs it and never looked up globally."""

    rank: int
    """This rank's index in this transport."""
    size: int
    """Number of ranks in this transport."""
    world_ranks: tuple[int, ...]
    """The index of each rank in the whole world, by rank. Error messages name it: a channel of some ranks has its own
    `rank`s, which a user never sees."""
    hosts: tuple[str, ...]
    """The host of each rank, by rank. Ranks with equal hosts can share memory."""
    timeout: timedelta
    """Longest wait without progress."""
    cluster: Cluster | None = None
    """The modelled cluster whose virtual clock this transport follows; None for real time."""
    seed: str = ""
    """Seed of the random part of that clock. Each rank and channel has another."""
    bytes_sent: int
    """Bytes of tensor data that this rank has sent, or has made others read, through this transport."""

    @property
    def world_rank(self) -> int:
        """This rank's index in the whole world."""
        return self.world_ranks[self.rank]

    @cached_property
    def activity(self) -> Activity:
        """What this process is doing, for others that wait for it. Where there are none, nobody reads it."""
        return Activity()

    @abstractmethod
    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        """Start sending. The tensor may not change until the work is done."""

    @abstractmethod
    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Work:
        """Start receiving into `tensor` from rank `src`, or from `ANY`."""

    @abstractmethod
    def channel(self, name: str, ranks: Sequence[int] | None = None) -> "Transport":
        """Open an independent transport between the same ranks, or between `ranks`, numbered in the order given.

        Messages of different channels never match each other. Collective: those ranks open the same names in the
        same order.
        """

    @abstractmethod
    def start(self, operation: Operation) -> Work:
        """Run `operation` in the background, after all operations that were started before it.

        An operation may run in any thread, so it draws no numbers from global random generators. From the first call
        on, only operations send and receive through this transport, except while none are in progress.
        """

    @abstractmethod
    def spawn(self, operation: Operation, *, deadline: bool = True) -> Work:
        """Run `operation` concurrently with the caller and with the other spawned operations, in one thread.

        The operation itself may wait without limit. `wait` on the returned work fails after the transport's timeout
        without progress, or never if `deadline` is False. From its first call on, a transport is used either through
        `spawn` or through `start`.
        """

    def signal(self) -> Signal:
        """Make a signal that spawned operations of this transport can yield."""
        return Signal()

    def now(self) -> float:
        """Seconds on this rank's clock: the machine's, or the simulator's."""
        return time.perf_counter()

    def elapse(self, seconds: float) -> None:
        """Let `seconds` of computation pass on a virtual clock. Does nothing in real time."""
        return None

    def sleep(self, seconds: float) -> None:
        """Do nothing for `seconds` of this rank's clock."""
        time.sleep(seconds)

    def interrupt(self) -> None:
        """End every wait on this transport, in any thread. This is the first half of `close`."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Release sockets, memory and threads, also those of channels. Peers that wait for it fail. Idempotent."""

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # A transport is a handle: a copied module that holds it communicates with the same peers.

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TransportWrapper(Transport):
    """A transport that adds something to `inner`, to which it forwards messages, operations and time."""

    inner: Transport

    @property
    def world_ranks(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.inner.world_ranks

    @property
    def activity(self) -> Activity:
        return self.inner.activity

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        return self.inner.isend(tensor, dst, tag)

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Work:
        return self.inner.irecv(tensor, src, tag)

    def start(self, operation: Operation) -> Work:
        return self.inner.start(operation)

    def spawn(self, operation: Operation, *, deadline: bool = True) -> Work:
        return self.inner.spawn(operation, deadline=deadline)

    def signal(self) -> Signal:
        return self.inner.signal()

    def now(self) -> float:
        return self.inner.now()

    def elapse(self, seconds: float) -> None:
        self.inner.elapse(seconds)

    def sleep(self, seconds: float) -> None:
        self.inner.sleep(seconds)
