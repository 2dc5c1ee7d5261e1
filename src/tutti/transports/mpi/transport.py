"""Open MPI as a transport. Importing this module starts MPI.

Nothing here blocks inside MPI on the caller's thread: messages are polled for, and the one blocking call, Open MPI's
own `Allreduce`, has a thread and a communicator to itself.
"""

import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import torch
from mpi4py import MPI
from torch import Tensor

from tutti.errors import ConfigError, DeadlineExceeded, RankLost, ReplicaMismatch, TuttiError
from tutti.transports.background import OperationThread
from tutti.transports.base import ANY, CompletedWork, Operation, Transport, Work
from tutti.transports.event_loop import EventLoop, ProgressEngine
from tutti.transports.membership import WATCH_SECONDS, ChannelMembership, Membership, rank_lost_error
from tutti.transports.mpi.algorithms import Rules

_SPIN_SECONDS = 0.0002
_LONGEST_PAUSE_SECONDS = 0.001
"""How often a rank that waits looks whether those it waits for are still there."""
_GRACE_SECONDS = 1.0
"""How long what a rank sent before it left may take to arrive."""

_SUMS: dict[torch.dtype, Any] = {
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
"""What MPI can add; it wraps integers as torch does."""


class _Polled(Work):
    """Work that somebody else moves along: MPI, or the thread that reduces."""

    def __init__(self, link: "MpiTransport", peers: Sequence[int]) -> None:
        self._link, self.peers = link, peers
        self._finished = False
        self.any = False
        """Whether one of the peers is enough."""

    def wait(self) -> None:
        if not self._finished:
            self._link._watch(self, self.peers)
            self._finish()
            self._finished = True

    def pause(self, seconds: float) -> None:
        """Let time pass, or less of it if the work is done sooner."""
        time.sleep(seconds)

    def _finish(self) -> None:
        """What is left for the caller's thread to do: raise, or copy to where the result belongs."""


class _Message(_Polled):
    """A send or a receive; `target` gets what arrived in `data`, if that is another tensor."""

    def __init__(self, link: "MpiTransport", start: Callable[..., Any], data: Tensor, peer: int, tag: int) -> None:
        super().__init__(link, [other for other in range(link.size) if other != link.rank] if peer == ANY else [peer])
        self.data, self.target = data, data
        self.any = peer == ANY
        self.error: Exception | None = None
        self._over = False
        self._status = MPI.Status()
        self._request = start(_bytes_of(data), MPI.ANY_SOURCE if peer == ANY else peer, tag)

    def done(self) -> bool:
        if not self._over:
            try:
                self._over = self._request.Test(self._status)
            except MPI.Exception as error:
                self._over, self.error = True, error
            if self._over:
                self._link._pending.discard(self)
        return self._over

    def abandon(self) -> bool:
        """Whether MPI will leave `data` alone from now on: a send it would not let go of."""
        return self.done()

    def _finish(self) -> None:
        if isinstance(self.error, MPI.Exception):
            if self.error.Get_error_class() == MPI.ERR_TRUNCATE:
                raise self._mismatch("more") from self.error
            raise self._link.membership.explain_error(self.error) from self.error
        if self.error is not None:
            raise self.error
        if self.target is not self.data:
            self.target.copy_(self.data)

    def _mismatch(self, how_much: str) -> ReplicaMismatch:
        membership = self._link.membership
        sender = membership.peers[self._status.Get_source()].rank
        return ReplicaMismatch(
            f"rank {membership.world_rank}: expected {self.data.numel()} × {self.data.dtype} from rank {sender}, "
            f"which sent {how_much}. All ranks must call with tensors of one length and dtype."
        )


class _Receive(_Message):
    """MPI tells the length of what came, but not its dtype: another one of the same size passes unseen."""

    def abandon(self) -> bool:
        if not self.done():
            self._request.Cancel()
            deadline = time.monotonic() + _GRACE_SECONDS
            while not self._request.Test() and time.monotonic() < deadline:
                time.sleep(_LONGEST_PAUSE_SECONDS)
            if not self._request.Test():
                return False  # Matched already, by a sender that does not go on.
            self._over, self.error = True, self._link._closed_early()
        return True

    def _finish(self) -> None:
        if self.error is None and (got := self._status.Get_count(MPI.BYTE)) != self.data.nbytes:
            raise self._mismatch(f"{got} bytes")
        super()._finish()

    @property
    def source(self) -> int:
        self.wait()
        return self._status.Get_source()


class _MpiReduction(_Polled):
    """A sum that the reducing thread makes of `data`, and that `target` gets."""

    def __init__(self, link: "MpiTransport", target: Tensor, data: Tensor) -> None:
        super().__init__(link, [other for other in range(link.size) if other != link.rank])
        self._target, self._data = target, data
        self._reduced = threading.Event()
        self._task: Work = CompletedWork()

    def start(self, reducer: OperationThread, comm: Any) -> None:
        self._task = reducer.start(self._steps(comm))

    def done(self) -> bool:
        return self._task.done()

    def pause(self, seconds: float) -> None:
        self._reduced.wait(max(seconds, 0.01))

    def _steps(self, comm: Any) -> Operation:
        try:
            yield _Blocking(lambda: comm.Allreduce(MPI.IN_PLACE, _summands_of(self._data)))
        finally:
            self._reduced.set()

    def _finish(self) -> None:
        try:
            self._task.wait()
        except MPI.Exception as error:
            raise self._link.membership.explain_error(error) from error
        if self._target is not self._data:
            self._target.copy_(self._data)


class _Blocking(Work):
    """A call that returns when the work is done."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        self._call()


class _Poller(ProgressEngine):
    """Looks at messages again and again."""

    def __init__(self, link: "MpiTransport") -> None:
        self._link = link
        self._woken = threading.Event()
        self._pause_s = 0.0
        self._looked_at = time.monotonic()
        self._lost: dict[int, str] = {}

    def idle(self, seconds: float = WATCH_SECONDS) -> None:
        self._pause_s = min(2 * self._pause_s + 0.00001, _LONGEST_PAUSE_SECONDS, seconds)
        if self._woken.wait(self._pause_s):
            self._woken.clear()
            self._pause_s = 0.0
        if time.monotonic() > self._looked_at + WATCH_SECONDS:
            self._looked_at = time.monotonic()
            self._lost = self._link._channel_membership.lost_ranks()

    def wake(self) -> None:
        self._woken.set()

    def over(self, work: Work) -> bool:
        if work.done():
            self._pause_s = 0.0
            return True
        return isinstance(work, _Message) and self._gone(work)

    def failure(self, work: Work) -> Exception | None:
        if not work.done():
            return rank_lost_error(self._link.membership.world_rank, self._lost)
        try:
            work.wait()
        except TuttiError as error:
            return error
        return None

    def timeout_error(self, awaited: str) -> DeadlineExceeded:
        return self._link.membership.timeout_error(awaited)

    def _gone(self, work: _Message) -> bool:
        return not work.any and self._link.membership.peers[work.peers[0]].rank in self._lost


class MpiTransport(Transport):
    """Messages and reductions over a communicator that holds the ranks of `membership`, in its order."""

    def __init__(self, membership: Membership, comm: Any, *, rules: Rules | None = None, name: str = "tutti") -> None:
        """Talk over `comm`.

        Args:
            comm: an mpi4py communicator that nobody else uses.
            rules: what is known of how Open MPI reduces, for `native_name`.
            name: distinguishes this conversation from others on the same membership.
        """
        self.rank, self.size, self.hosts = membership.rank, membership.size, membership.hosts
        self.world_rank = membership.world_rank
        self.timeout, self.bytes_sent = membership.timeout, 0
        self.membership = membership
        self.rules = rules or Rules()
        self._held: list[_Polled] = []  # What MPI still uses of conversations that are closed.
        self._comm, self._name = comm, name
        self._channel_membership = ChannelMembership(membership, name)
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._reductions: Any = None
        self._opened: Counter[str] = Counter()
        self._channels: list[MpiTransport] = []
        self._pending: set[_Message] = set()
        self._reducing: list[_MpiReduction] = []
        self._steps = OperationThread(f"rank {membership.world_rank}")
        self._reducer = OperationThread(f"rank {membership.world_rank}, reductions")
        self._loop = EventLoop(f"rank {membership.world_rank}", _Poller(self), membership.timeout.total_seconds())
        self._closed = False
        self._beside = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        if not self._beside and self.rank == 0:
            warnings.warn("this MPI serves one thread only (no MPI_THREAD_MULTIPLE): nothing overlaps.", stacklevel=2)

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        self.membership.check_peer(dst)
        self.bytes_sent += tensor.nbytes
        return self._post(_Message, self._comm.Isend, tensor.detach().contiguous().cpu(), dst, tag)

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Work:
        if src != ANY:
            self.membership.check_peer(src)
        direct = tensor.is_contiguous() and tensor.device.type == "cpu"
        data = tensor.detach() if direct else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        message = self._post(_Receive, self._comm.Irecv, data, src, tag)
        if not direct:
            message.target = tensor.detach()
        return message

    def all_reduce(self, tensor: Tensor) -> Work:
        self._check_open()
        if tensor.is_complex():
            return self.all_reduce(torch.view_as_real(tensor))
        if self.size == 1 or tensor.numel() == 0:
            return CompletedWork()
        self.bytes_sent += 2 * (self.size - 1) * tensor.nbytes // self.size
        target = tensor.detach()
        reduction = _MpiReduction(self, target, _addable(target))
        if self._reductions is None:
            self._reductions = self._duplicate(f"{self._name}/reductions")
        if not self._beside:
            self._reductions.Allreduce(MPI.IN_PLACE, _summands_of(reduction._data))
            return reduction
        self._reducing = [under_way for under_way in self._reducing if not under_way.done()]
        self._reducing.append(reduction)
        reduction.start(self._reducer, self._reductions)
        return reduction

    def native_name(self, num_bytes: int) -> str:
        """Which algorithm, or component, of Open MPI `all_reduce` uses for so many bytes; any other MPI's name."""
        vendor = MPI.get_vendor()[0]
        if vendor != "Open MPI":
            return vendor
        return self.rules.name(self.hosts, num_bytes)

    def channel(self, name: str, ranks: Sequence[int] | None = None) -> "MpiTransport":
        self._check_open()
        key = f"{self._name}/{name}" if ranks is None else f"{self._name}/{name}/{'-'.join(map(str, ranks))}"
        self._opened[key] += 1
        full_name = f"{key}.{self._opened[key]}"
        membership = self.membership if ranks is None else self.membership.subset(ranks)
        comm = self._duplicate(full_name) if ranks is None else self._select(full_name, membership, ranks)
        made = MpiTransport(membership, comm, rules=self.rules, name=full_name)
        made._held = self._held
        self._channels = [*(channel for channel in self._channels if not channel._closed), made]
        return made

    @property
    def broken(self) -> bool:
        """Whether a thread is still inside MPI after `close`: MPI cannot be ended in order then."""
        return any(isinstance(held, (_MpiReduction, _Receive)) and not held.done() for held in self._held)

    def start(self, operation: Operation) -> Work:
        self._check_open()
        if self._beside:
            return self._steps.start(operation)
        for work in operation:
            work.wait()
        return CompletedWork()

    def spawn(self, operation: Operation, *, deadline: bool = True) -> Work:
        self._check_open()
        if not self._beside:
            raise ConfigError(
                f"rank {self.rank}: this MPI serves one thread only (no MPI_THREAD_MULTIPLE), and nothing can go on "
                "beside training. Use another transport, or an MPI that serves several."
            )
        return self._loop.add(operation, deadline)

    def close(self) -> None:
        """End what is under way.

        Communicators stay until MPI ends: to free one is collective, so it may block where peers are gone, and a late
        message could reach the next one of the same number. Each takes some 8 KB.
        """
        if self._closed:
            return
        self._closed = True
        for channel in self._channels:
            channel.close()
        self._channel_membership.close()
        self._steps.close()
        self._loop.close()
        self._held += [message for message in list(self._pending) if not message.abandon()]
        deadline = time.monotonic() + _GRACE_SECONDS
        while (stuck := [it for it in self._reducing if not it.done()]) and time.monotonic() < deadline:
            stuck[0].pause(_LONGEST_PAUSE_SECONDS)
        if stuck:  # Nothing ends a blocking call of MPI's: its thread stays.
            self._held += stuck
        else:
            self._reducer.close()

    def _post(self, kind: type[_Message], start: Callable[..., Any], data: Tensor, peer: int, tag: int) -> _Message:
        self._check_open()
        try:
            message = kind(self, start, data, peer, tag)
        except MPI.Exception as error:
            raise self.membership.explain_error(error) from error
        self._pending.add(message)
        return message

    def _duplicate(self, name: str) -> Any:
        self._arrive(name, self.membership)
        return self._comm.Dup()

    def _select(self, name: str, membership: Membership, ranks: Sequence[int]) -> Any:
        self._arrive(name, membership)
        group = self._comm.Get_group().Incl(list(ranks))
        return self._comm.Create_group(group, crc32(name.encode()) % 32_768)

    def _arrive(self, name: str, membership: Membership) -> None:
        """Meet in the store first, which has a deadline: making a communicator has none."""
        membership.store.set(f"{name}/came/{membership.world_rank}", "1")
        membership.await_keys([f"{name}/came/{peer.rank}" for peer in membership.peers], f"all ranks of '{name}'")

    def _watch(self, work: _Polled, peers: Sequence[int]) -> None:
        """Return when `work` is done; raise when that can no longer be."""
        started = looked = time.monotonic()
        lost_since, pause = float("inf"), 0.00001
        while not work.done():
            now = time.monotonic()
            if self._closed:
                raise self._closed_early()
            late = now - started > self.timeout.total_seconds()
            if late or now - looked > WATCH_SECONDS:
                looked, gone = now, self._gone(peers, work)
                lost_since = min(lost_since, now) if gone else float("inf")
                if gone and (late or now - lost_since > _GRACE_SECONDS):
                    raise self.membership.loss_error(self.membership.gone() or gone)
                if late:
                    raise self.membership.timeout_error("a reply over MPI")
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            work.pause(0 if now - started < _SPIN_SECONDS else pause)

    def _gone(self, peers: Sequence[int], work: _Polled) -> dict[int, str]:
        """Those of `peers` that will not answer here, if `work` cannot do without them."""
        lost = [self._channel_membership.lost(peer) for peer in peers]
        found = {who: why for each in lost for who, why in each.items()}
        return found if all(lost) or not work.any else {}

    def _closed_early(self) -> RankLost:
        return RankLost(f"rank {self.membership.world_rank}: this transport was closed with work still to do.")

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError(f"rank {self.rank}: this transport is closed.")


def _bytes_of(tensor: Tensor) -> list[Any]:
    return [MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), MPI.BYTE]


def _summands_of(tensor: Tensor) -> list[Any]:
    return [MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), _SUMS[tensor.dtype]]


def _addable(tensor: Tensor) -> Tensor:
    """The tensor itself if MPI can add it where it is, or a copy that it can add."""
    wide = tensor.dtype
    if wide not in _SUMS:
        wide = torch.int32 if wide == torch.bool else torch.float32
    return tensor.to("cpu", wide).contiguous()
