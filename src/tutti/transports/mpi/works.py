"""Sends, receives and reductions over MPI that are in progress. None of them blocks inside MPI on the caller's thread.

A message is an MPI request that is tested again and again. A reduction is a blocking `Allreduce` in a thread of its
own. The caller's thread waits for either in `MpiTransport.watch`, which has deadlines and sees lost ranks; MPI has
neither.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI
from torch import Tensor

from tutti.errors import ReplicaMismatch
from tutti.transports.background import OperationThread
from tutti.transports.base import ANY, CompletedWork, Operation, Work

if TYPE_CHECKING:
    from tutti.transports.mpi.transport import MpiTransport

LONGEST_PAUSE_SECONDS = 0.001
"""Longest sleep between two tests of a request."""
GRACE_SECONDS = 1.0
"""How long data of a rank that left may take to arrive, and how long closing waits for what MPI still uses."""

_MPI_SUM_TYPES: dict[torch.dtype, Any] = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
}
"""The dtypes that MPI can add. It wraps integers as torch does."""


class PolledWork(Work):
    """Work that MPI or the reducing thread completes, and that the caller's thread looks at until then."""

    def __init__(self, transport: "MpiTransport", peers: Sequence[int]) -> None:
        """Prepare work that depends on `peers`."""
        self._transport, self.peers = transport, peers
        self._finished = False
        self.any_peer = False
        """Whether one of the peers is enough."""

    def wait(self) -> None:
        if not self._finished:
            self._transport.watch(self)
            self._finish()
            self._finished = True

    def pause(self, seconds: float) -> None:
        """Let about `seconds` pass; subclasses return earlier if the work is done."""
        time.sleep(seconds)

    def _finish(self) -> None:
        """Do what is left for the caller's thread: raise the error, or copy the result to where it belongs."""


class MpiMessage(PolledWork):
    """A send, and the common part of a receive."""

    def __init__(self, transport: "MpiTransport", start: Callable[..., Any], data: Tensor, peer: int, tag: int) -> None:
        """Start the request with `start`, which is `Isend` or `Irecv`; `data` is contiguous and on the CPU."""
        others = [other for other in range(transport.size) if other != transport.rank]
        super().__init__(transport, others if peer == ANY else [peer])
        self.data = data
        self.target = data
        """Gets what arrived in `data`, if it is another tensor."""
        self.any_peer = peer == ANY
        self.error: Exception | None = None
        self._over = False
        self._status = MPI.Status()
        # As bytes: MPI has no types for some of torch's dtypes.
        # `data` is kept by this object, so that its memory lives as long as the request.
        self._request = start(_byte_buffer(data), MPI.ANY_SOURCE if peer == ANY else peer, tag)

    def done(self) -> bool:
        if not self._over:
            try:
                self._over = self._request.Test(self._status)
            except MPI.Exception as error:
                self._over, self.error = True, error
            if self._over:
                # MPI is done with the memory: closing need not cancel it.
                self._transport.pending.discard(self)
        return self._over

    def abandon(self) -> bool:
        """Stop the message; return whether MPI leaves `data` alone from now on. A send cannot be cancelled."""
        return self.done()

    def _finish(self) -> None:
        if isinstance(self.error, MPI.Exception):
            if self.error.Get_error_class() == MPI.ERR_TRUNCATE:
                raise self._mismatch("more") from self.error
            raise self._transport.membership.explain_error(self.error) from self.error
        if self.error is not None:
            raise self.error
        if self.target is not self.data:
            self.target.copy_(self.data)

    def _mismatch(self, how_much: str) -> ReplicaMismatch:
        """Return the error of a message whose length differs from that of the tensor it is received into."""
        membership = self._transport.membership
        sender = membership.peers[self._status.Get_source()].rank
        return ReplicaMismatch(
            f"rank {membership.world_rank}: expected {self.data.numel()} × {self.data.dtype} from rank {sender}, "
            f"which sent {how_much}. All ranks must call with tensors of one length and dtype."
        )


class MpiReceive(MpiMessage):
    """A receive. MPI reports the length of a message but not its dtype: another one of the same size goes unnoticed."""

    def abandon(self) -> bool:
        if not self.done():
            self._request.Cancel()
            deadline = time.monotonic() + GRACE_SECONDS
            # A cancelled request has to be completed too. `Test` of one that is complete returns True again.
            # Bounded: a receive that was matched waits for a sender that may never send the rest.
            while not self._request.Test() and time.monotonic() < deadline:
                time.sleep(LONGEST_PAUSE_SECONDS)
            if not self._request.Test():
                return False  # It was matched already, with a sender that does not continue.
            self._over, self.error = True, self._transport.closed_error()
        return True

    def _finish(self) -> None:
        # MPI reports a message that is too long as an error, but accepts one that is too short.
        if self.error is None and (got := self._status.Get_count(MPI.BYTE)) != self.data.nbytes:
            raise self._mismatch(f"{got} bytes")
        super()._finish()

    @property
    def source(self) -> int:
        self.wait()
        return self._status.Get_source()


class MpiReduction(PolledWork):
    """A sum that the reducing thread makes of `data`; `target` gets it."""

    def __init__(self, transport: "MpiTransport", target: Tensor) -> None:
        """Prepare a sum of `target`, in a copy if MPI cannot add it where it is."""
        super().__init__(transport, [other for other in range(transport.size) if other != transport.rank])
        self._target, self._data = target, _summable(target)
        self._reduced = threading.Event()
        self._operation: Work = CompletedWork()

    def start(self, reducer: OperationThread, comm: Any) -> None:
        """Let the reducing thread call `Allreduce`, after the reductions before this one."""
        self._operation = reducer.start(self._run(comm))

    def run_here(self, comm: Any) -> None:
        """Call `Allreduce` in this thread. It blocks without a deadline."""
        comm.Allreduce(MPI.IN_PLACE, _sum_buffer(self._data))

    def done(self) -> bool:
        return self._operation.done()

    def pause(self, seconds: float) -> None:
        # The reducing thread ends this wait, so a longer pause delays nothing.
        self._reduced.wait(max(seconds, 0.01))

    def _run(self, comm: Any) -> Operation:
        """The operation that the reducing thread runs: one blocking call."""
        try:
            # The thread of `reducer` waits for this work, and so makes the call.
            yield _BlockingCall(lambda: self.run_here(comm))
        finally:
            # Also after an error: the waiting thread must wake up to raise it.
            self._reduced.set()

    def _finish(self) -> None:
        try:
            self._operation.wait()
        except MPI.Exception as error:
            raise self._transport.membership.explain_error(error) from error
        if self._target is not self._data:
            self._target.copy_(self._data)


class _BlockingCall(Work):
    """A call that returns when the work is done."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        self._call()


def _byte_buffer(tensor: Tensor) -> list[Any]:
    """The memory of a tensor as MPI bytes."""
    return [MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), MPI.BYTE]


def _sum_buffer(tensor: Tensor) -> list[Any]:
    """The memory of a tensor as elements that MPI can add."""
    return [MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), _MPI_SUM_TYPES[tensor.dtype]]


def _summable(tensor: Tensor) -> Tensor:
    """The tensor itself if MPI can add it where it is, or a copy in a wider dtype on the CPU."""
    wide = tensor.dtype
    if wide not in _MPI_SUM_TYPES:
        # Complex tensors are not among them: they come here as pairs of real numbers.
        # What is left are booleans, float16, bfloat16 and narrower floats: MPI has no type for them.
        wide = torch.int32 if wide == torch.bool else torch.float32
    return tensor.to("cpu", wide).contiguous()
