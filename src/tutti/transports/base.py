"""What a transport is: the one thing strategies and collectives know about the outside world."""

import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from datetime import timedelta
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from tutti.cluster import Cluster

ANY = -1
"""Receive from whichever rank sends first."""

DEFAULT_TIMEOUT = timedelta(minutes=5)
"""How long a wait lasts before it is an error, unless the caller says otherwise."""


class Work(ABC):
    """Something under way. Abandoning it is allowed only when the transport is closed."""

    __slots__ = ()

    @abstractmethod
    def done(self) -> bool:
        """Whether `wait` would return at once. Never blocks; may move the work along."""

    @abstractmethod
    def wait(self) -> None:
        """Return when finished.

        Raises `RankLost` if a peer is gone and `DeadlineExceeded` after the transport's timeout.
        """

    @property
    def source(self) -> int:
        """The rank a finished receive came from."""
        raise AssertionError(f"{type(self).__name__} is not a receive")


class CompletedWork(Work):
    """Work that is over already."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class Signal(Work):
    """Work that is done when somebody says so: by it, steps of one transport wait for each other."""

    def __init__(self) -> None:
        self._given = False

    def set(self) -> None:
        """It is done."""
        self._given = True

    def done(self) -> bool:
        return self._given

    def wait(self) -> None:
        assert self._given, "only steps wait for a signal"


Operation = Generator[Work, None, None]
"""A collective on its way: it yields each piece of work that must be done before it can go on.

If that fails, the error is raised where it was yielded, and steps that catch it go on.
"""


class Transport(ABC):
    """Moves tensors between ranks. Passed to whoever needs it, never looked up.

    One thread at a time may use a transport; a second thread takes a `channel` of its own.
    """

    rank: int
    size: int
    world_rank: int
    """This rank's number among all, by which errors name it: a channel between some of them has ranks of its own."""
    hosts: tuple[str, ...]
    """The host of each rank, by rank: equal where ranks can share memory."""
    timeout: timedelta
    cluster: Cluster | None = None
    """What its clock follows; None where time passes by itself."""
    seed: str = ""
    """Of what is random about that clock; another for every rank and conversation."""
    bytes_sent: int
    """Bytes of tensor data this rank has sent, or made others read, through this transport."""

    @abstractmethod
    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        """Start sending. The tensor may not change until the work is done."""

    @abstractmethod
    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Work:
        """Start receiving into `tensor` from rank `src`, or from `ANY`."""

    @abstractmethod
    def channel(self, name: str, ranks: Sequence[int] | None = None) -> "Transport":
        """An independent conversation between the same ranks, or between some of them, numbered in the order given.

        Collective: those ranks open the same names in the same order.
        """

    @abstractmethod
    def start(self, operation: Operation) -> Work:
        """Take the steps of `operation` beside the caller, when those started before are done.

        Steps yield what they wait for, and draw no numbers from global generators: they may run in any thread.
        From the first call on, all that is sent and received through this transport is in such steps,
        except while none are under way.
        """

    @abstractmethod
    def spawn(self, operation: Operation, *, deadline: bool = True) -> Work:
        """Run `operation` concurrently with the caller and with the other spawned operations, in one thread.

        The operation itself may wait without limit. `wait` on the returned work fails after the transport's timeout
        without progress, or never if `deadline` is False. From its first call on, a transport is used either through
        `spawn` or through `start`.
        """

    def signal(self) -> Signal:
        """Something that steps taken beside each other can wait for."""
        return Signal()

    def now(self) -> float:
        """Seconds on this rank's clock: the machine's, unless a transport has a clock of its own."""
        return time.perf_counter()

    def elapse(self, seconds: float) -> None:
        """Let `seconds` of computation pass: nothing to do where time passes by itself."""
        return None

    def interrupt(self) -> None:
        """Make whoever waits, in whatever thread, stop waiting: the first half of `close`."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Release sockets, memory and threads, of its channels too; peers that wait for them fail. Idempotent."""

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # A handle: a copied module that holds it talks to the same peers.

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TransportWrapper(Transport):
    """A transport that adds to another: messages, steps and time are those of `inner`."""

    inner: Transport

    @property
    def world_rank(self) -> int:  # type: ignore[override]
        return self.inner.world_rank

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


@runtime_checkable
class AllReduces(Protocol):
    """A transport that sums across ranks better than sends and receives could."""

    def all_reduce(self, tensor: Tensor) -> Work:
        """Replace `tensor` by its sum over ranks, the same bits on all of them.

        Every rank starts the same reductions in the same order; several may be under way.
        """
        ...


@runtime_checkable
class Averages(Protocol):
    """A transport that also weighs what it sums, so that nobody has to scale or divide."""

    def average(self, tensor: Tensor, weight: float) -> Work:
        """Replace `tensor` by its weighted mean over ranks, under the rules of `all_reduce`.

        With equal weights it is the sum divided by the number of ranks, to the bit. A rank of
        weight 0 contributes nothing, NaN included.
        """
        ...


@runtime_checkable
class Broadcasts(Protocol):
    """A transport that hands out rank 0's tensor better than messages could."""

    def broadcast(self, tensor: Tensor) -> Work:
        """Overwrite `tensor` on every rank with rank 0's, to the bit."""
        ...


@runtime_checkable
class ReportsProgress(Protocol):
    """A transport whose waits go on as long as those they wait for show that they do."""

    def report_progress(self) -> None:
        """Tell those who wait for this rank that it goes on, slowly."""
        ...


@runtime_checkable
class SpawnsInline(Protocol):
    """A transport that lets the caller take steps beside others as far as they go at once."""

    def spawn_inline(self, operation: Operation) -> Work:
        """As `Transport.spawn` without a deadline, but without waking anybody."""
        ...


@runtime_checkable
class CanShare(Protocol):
    """A transport whose ranks, where they are on one host, can do better than send messages."""

    def shared(self) -> Transport:
        """The same conversation with sums in memory. Collective; for ranks of one host."""
        ...


@runtime_checkable
class SharesMemory(Protocol):
    """A transport whose peers can read memory that it hands out, so that a bucket needs no copy."""

    inner: Transport
    """The transport beneath, for tensors that cannot live in such memory."""

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat CPU tensor that every rank can reach. Collective: all ranks ask for the same."""
        ...


@runtime_checkable
class SharesAll(Protocol):
    """A transport all of whose ranks can have one and the same memory."""

    def shared_tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat CPU tensor, zeros at first, that is one and the same on every rank. Collective."""
        ...

    def per_rank_tensors(self, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """A flat CPU tensor of each rank, all of them on every rank. Collective."""
        ...

    def abort(self) -> None:
        """This rank cannot go on: nobody should wait for it here."""
        ...


def for_devices(transport: Transport, device_types: set[str]) -> Transport:
    """The transport to use for tensors of these devices: only CPU tensors can live in shared memory."""
    if isinstance(transport, SharesMemory) and not device_types <= {"cpu", "meta"}:
        return transport.inner
    return transport
