"""Optional capabilities of transports, as protocols that callers test with `isinstance`.

Every transport sends messages. Some do more: sum in shared memory, broadcast, share tensors, report progress. Code that
can profit asks for the protocol and otherwise falls back to messages.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from tutti.transports.base import Operation, Transport, Work


@runtime_checkable
class AllReduces(Protocol):
    """A transport with an all-reduce that is faster than one made of messages."""

    def all_reduce(self, tensor: Tensor) -> Work:
        """Replace `tensor` by its sum over ranks, bit-identical on all of them.

        Every rank starts the same reductions in the same order; several may be in progress.
        """
        ...


@runtime_checkable
class Averages(Protocol):
    """A transport that also computes weighted means, so that callers neither scale nor divide."""

    def average(self, tensor: Tensor, weight: float) -> Work:
        """Replace `tensor` by its weighted mean over ranks, under the rules of `all_reduce`.

        With equal weights the result is the sum divided by the number of ranks, bit for bit. A rank of weight 0
        contributes nothing, not even NaN.
        """
        ...


@runtime_checkable
class Broadcasts(Protocol):
    """A transport with a broadcast that is faster than one made of messages."""

    def broadcast(self, tensor: Tensor) -> Work:
        """Overwrite `tensor` on every rank with rank 0's, bit for bit."""
        ...


@runtime_checkable
class ReportsProgress(Protocol):
    """A transport whose waits are prolonged while the ranks waited for report progress."""

    def report_progress(self) -> None:
        """Restart the deadline of the ranks that wait for this one: it is slow, but alive and working."""
        ...


@runtime_checkable
class SpawnsInline(Protocol):
    """A transport that can run the start of a spawned operation in the calling thread."""

    def spawn_inline(self, operation: Operation) -> Work:
        """As `Transport.spawn` without a deadline, but the caller runs the operation until it first has to wait.

        So an operation whose messages are ready needs no other thread to wake up.
        """
        ...


@runtime_checkable
class CanShare(Protocol):
    """A transport that has a shared-memory counterpart for ranks of one host."""

    def shared(self) -> Transport:
        """Return this transport with sums in shared memory. Collective; all ranks must be on one host."""
        ...


@runtime_checkable
class SharesMemory(Protocol):
    """A transport that allocates tensors which its peers can read, so that reducing a bucket needs no copy."""

    inner: Transport
    """The message transport beneath, for tensors that cannot live in shared memory."""

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate a flat CPU tensor that every rank can reach. Collective: all ranks ask for the same size."""
        ...


@runtime_checkable
class SharesAll(Protocol):
    """A transport all of whose ranks can map the same memory."""

    def shared_tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate one flat CPU tensor of zeros that all ranks map. Collective."""
        ...

    def per_rank_tensors(self, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Allocate one flat CPU tensor per rank; every rank maps all of them. Collective."""
        ...

    def abort(self) -> None:
        """Tell the peers that this rank cannot continue here, so that none waits for it."""
        ...


def for_devices(transport: Transport, device_types: set[str]) -> Transport:
    """Return the transport to use for tensors of these device types: only CPU tensors can live in shared memory."""
    # Meta tensors hold no data (dry runs), so any transport serves them.
    if isinstance(transport, SharesMemory) and not device_types <= {"cpu", "meta"}:
        return transport.inner
    return transport
