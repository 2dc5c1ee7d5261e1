"""All-reduce between the ranks of one host without copying: gradients live where every rank can reach them.

Each rank owns one slice of every reduction. It waits until all ranks have published their data, adds
up its slice over all of them and writes the sum back into all of them; when every rank has done so,
everyone holds the result. Nothing else is synchronised: a rank that is early works ahead, and
several reductions may be under way. Two counters per rank say how far it is.

The memory is anonymous (memfd): it never has a name, so nothing can be left behind, not even by
SIGKILL, and its size is not bound by /dev/shm, which containers often make small. A rank opens a
peer's memory through /proc/PID/fd, which the kernel allows to the same user alone.
"""

import ctypes
import math
import mmap
import os
import time
from collections import deque
from collections.abc import Sequence
from weakref import WeakSet, finalize

import numpy as np
import torch
from torch import Tensor

from tutti.errors import ConfigError, ReplicaMismatch, WeightRefused
from tutti.transports.base import CompletedWork, TransportWrapper, Work
from tutti.transports.membership import Membership
from tutti.transports.shared_memory.flags import Flags, spins_for
from tutti.transports.shared_memory.reduction import KERNELS, combine
from tutti.transports.sockets.transport import SocketTransport

# The counters: a page head, then a row per rank: ready, done, and what it asked for in its last DEPTH reductions.
_HEAD, _ROW, _DEPTH = 16, 160, 32
_READY, _CLOSED, _DONE, _BEATS, _ASKED, _ENTRY = 0, 4, 8, 12, 16, 4

_STAGING_BYTES = 4 * 2**20
_LINE_BYTES = 64
_CHECK_SECONDS = 0.2

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool,
)  # fmt: skip


class _Memory(mmap.mmap):
    """A mapping that keeps alive the segment it is part of; a tensor made on it keeps the mapping."""

    segment: "_Segment"


class _Segment:
    """The same number of bytes from every rank, all mapped here."""

    def __init__(self, number: int, memories: list[_Memory], rank: int) -> None:
        self.number = number
        mine = memories[rank]
        mine.segment = self
        self.peers = [memory for memory in memories if memory is not mine]
        self.bases = np.array([torch.frombuffer(memory, dtype=torch.uint8).data_ptr() for memory in memories])
        self.start = int(self.bases[rank])
        self.stop = self.start + len(mine)


class _Plan:
    """Where a tensor lies in every rank's memory, and which slice of it is ours to add up."""

    def __init__(self, segment: _Segment, address: int, tensor: Tensor, rank: int, size: int) -> None:
        offset = address - segment.start
        self.addresses = segment.bases + offset
        self.place = (segment.number << 48) + offset  # Where it lies, said so that ranks can compare.
        self.dtype = tensor.dtype
        self.code = _DTYPES.index(tensor.dtype)
        self.numel = tensor.numel()
        self.num_bytes = tensor.nbytes
        self.start, self.stop = _slice(self.numel, tensor.itemsize, rank, size)
        self.kernel = KERNELS.get(tensor.dtype)

    def reduce(self, weights: np.ndarray, divisor: float) -> None:
        if self.start == self.stop:
            return
        if self.kernel is not None:
            self.kernel(self.addresses, self.addresses, self.start, self.stop, weights, divisor)
        else:
            combine([self._view(int(address)) for address in self.addresses], weights.tolist(), divisor)

    def _view(self, address: int) -> Tensor:
        raw = (ctypes.c_char * self.num_bytes).from_address(address)
        return torch.frombuffer(raw, dtype=self.dtype)[self.start : self.stop]


def _slice(numel: int, itemsize: int, rank: int, size: int) -> tuple[int, int]:
    """Rank's share of `numel` elements, cut at cache lines so that no two ranks write the same one."""
    line = max(1, _LINE_BYTES // itemsize)
    share = -(-numel // (size * line)) * line
    return min(rank * share, numel), min((rank + 1) * share, numel)


class _SharedMemoryReduction(Work):
    """One all-reduce under way, number `index` of its transport."""

    def __init__(self, transport: "SharedMemoryTransport", index: int, plan: _Plan, averaged: bool) -> None:
        self._transport = transport
        self.index = index
        self.plan = plan
        self.averaged = averaged

    def done(self) -> bool:
        return self._transport._finished(self.index)

    def wait(self) -> None:
        self._transport._finish(self.index)


class SharedMemoryTransport(TransportWrapper):
    """Ranks of one host. Sums in place in shared memory; messages and CUDA tensors go through `inner`."""

    inner: SocketTransport

    def __init__(self, inner: SocketTransport) -> None:
        self.inner = inner
        self.membership = inner.membership
        if not self.membership.one_host:
            hosts = sorted({peer.host for peer in self.membership.peers})
            raise ConfigError(f"shared memory reaches one host only, but the ranks are on {', '.join(hosts)}.")
        self.rank, self.size, self.hosts, self.timeout = inner.rank, inner.size, inner.hosts, inner.timeout
        self._reduced_bytes = 0
        self._name = f"{inner.name}/memory"
        self._num_segments = 0
        self._segments: WeakSet[_Segment] = WeakSet()
        pages = _map_all(self.membership, f"{self._name}/counters", 8 * (_HEAD + _ROW * self.size))
        counters = np.frombuffer(pages[0], dtype=np.int64)
        self._flags = Flags(counters, spins_for(self.size))
        rows = _HEAD + _ROW * np.arange(self.size, dtype=np.int64)
        self._row = int(rows[self.rank])
        self._ready, self._done = rows + _READY, rows + _DONE
        self._weights = np.ones(self.size)
        self._plans: dict[tuple[int, int, torch.dtype], _Plan] = {}
        self._staging = self.empty(_STAGING_BYTES, torch.uint8)
        self._closed = False
        self._channels: WeakSet[SharedMemoryTransport] = WeakSet()
        self._posted = 0
        self._pending: deque[_SharedMemoryReduction] = deque()

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        return self.inner.bytes_sent + self._reduced_bytes

    def channel(self, name: str, ranks: Sequence[int] | None = None) -> "SharedMemoryTransport":
        made = SharedMemoryTransport(self.inner.channel(name, ranks))
        self._channels.add(made)
        return made

    def interrupt(self) -> None:
        if not self._closed:
            self._flags.publish(self._row + _CLOSED, 1)
        self._closed = True
        for channel in self._channels:
            channel.interrupt()
        self.inner.interrupt()

    def close(self) -> None:
        self.interrupt()
        self.inner.close()  # From here on no other thread is at work.
        for channel in self._channels:
            channel.close()
        self._pending.clear()
        self._plans.clear()
        self._staging = torch.empty(0, dtype=torch.uint8)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        memories = _map_all(self.membership, f"{self._name}/{self._num_segments}", max(1, numel) * dtype.itemsize)
        self._segments.add(_Segment(self._num_segments, memories, self.rank))
        self._num_segments += 1
        return torch.frombuffer(memories[self.rank], dtype=dtype)[:numel]

    def shared_tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat CPU tensor, zeros at first, that is one and the same on every rank. Collective."""
        memories = _map_all(self.membership, f"{self._name}/{self._num_segments}", max(1, numel) * dtype.itemsize)
        self._num_segments += 1
        return torch.frombuffer(memories[0], dtype=dtype)[:numel]

    def per_rank_tensors(self, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """A flat CPU tensor of each rank, all of them on every rank. Collective."""
        memories = _map_all(self.membership, f"{self._name}/{self._num_segments}", max(1, numel) * dtype.itemsize)
        self._num_segments += 1
        return [torch.frombuffer(memory, dtype=dtype)[:numel] for memory in memories]

    def flags(self, num_slots: int) -> Flags:
        """Counters that every rank can change; the first 16 are not for use. Collective."""
        return Flags(self.shared_tensor(num_slots, torch.int64).numpy(), spins_for(self.size))

    def missing(self) -> dict[int, str]:
        """Ranks that will answer here no more, and how that is known."""
        found = {rank: why for rank in range(self.size) if (why := self._how_gone(rank)) is not None}
        return found | dict.fromkeys(self._closed_ranks(), "it has closed this conversation")

    def abort(self) -> None:
        """This rank cannot go on: nobody should wait for it here."""
        self.inner.conversation.abort()

    def check_open(self) -> None:
        """Raise if this conversation was closed, here, meanwhile."""
        if self._closed or self.inner.closed:
            raise self.inner.conversation.closed_meanwhile()

    def all_reduce(self, tensor: Tensor) -> Work:
        if tensor.is_cuda:
            return self.inner.all_reduce(tensor)
        return self._reduce(torch.view_as_real(tensor) if tensor.is_complex() else tensor, 1.0, averaged=False)

    def average(self, tensor: Tensor, weight: float) -> Work:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise ConfigError(
                f"rank {self.membership.me}: the mean of {tensor.dtype} tensors is not an integer; use a sum."
            )
        return self._reduce(torch.view_as_real(tensor) if tensor.is_complex() else tensor, weight, averaged=True)

    def broadcast(self, tensor: Tensor) -> Work:
        if tensor.is_cuda:
            raise ConfigError(f"rank {self.membership.me}: only CPU tensors can be broadcast in shared memory.")
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return self._reduce(real, float(self.rank == 0), averaged=False)  # The sum in which only rank 0 counts.

    def _reduce(self, tensor: Tensor, weight: float, averaged: bool) -> Work:
        if self._closed:
            raise ConfigError(f"rank {self.membership.me}: this transport is closed.")
        plan = self._plan(tensor) if tensor.is_contiguous() else None
        if plan is None:
            return self._reduce_private(tensor, weight, averaged)
        return self._post(plan, tensor.numel(), weight, averaged)

    def _reduce_private(self, tensor: Tensor, weight: float, averaged: bool) -> Work:
        """Carry a tensor that peers cannot see through the staging memory, piece by piece."""
        flat = tensor.reshape(-1)
        stage = self._staging.view(tensor.dtype)
        for piece in flat.split(stage.numel()):
            shared = stage[: piece.numel()]
            shared.copy_(piece)
            plan = self._plan(shared)
            assert plan is not None
            self._post(plan, flat.numel(), weight, averaged).wait()
            piece.copy_(shared)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))
        return CompletedWork()

    def _plan(self, tensor: Tensor) -> _Plan | None:
        """How to reduce `tensor`, if it lies in memory that all ranks can reach."""
        # A tensor of no elements lies nowhere; it still has to meet its peers, to be found equal to theirs.
        key = (tensor.data_ptr() or self._staging.data_ptr(), tensor.numel(), tensor.dtype)
        if (plan := self._plans.get(key)) is not None:
            return plan
        for segment in self._segments:
            if segment.start <= key[0] < segment.stop:
                plan = self._plans[key] = _Plan(segment, key[0], tensor, self.rank, self.size)
                finalize(segment, self._plans.pop, key, None)  # Its addresses go with it.
                return plan
        return None

    def _post(self, plan: _Plan, numel: int, weight: float, averaged: bool) -> _SharedMemoryReduction:
        """Show everyone this rank's part of the next reduction."""
        index = self._posted
        if index >= _DEPTH:
            self._finish(index - _DEPTH)  # Its row entry is about to be written over.
        self._reduced_bytes += plan.num_bytes
        work = _SharedMemoryReduction(self, index, plan, averaged)
        self._pending.append(work)
        self._posted = index + 1
        entry = self._row + _ASKED + _ENTRY * (index % _DEPTH)
        self._flags.announce(entry, (numel, 2 * plan.code + averaged, plan.place), weight)
        self._flags.publish(self._row + _READY, index + 1)
        self._work_ahead()
        return work

    def _work_ahead(self) -> None:
        """Add up what everyone has published, without waiting for anything."""
        while self._pending and self._flags.reached(self._ready, self._pending[0].index + 1):
            self._add_up(self._pending.popleft())

    def _add_up(self, work: _SharedMemoryReduction) -> None:
        entry = _ASKED + _ENTRY * (work.index % _DEPTH)
        divisor = self._flags.weigh(self._ready + (entry - _READY), self._weights)
        if math.isnan(divisor):
            raise self._refusal(entry)
        work.plan.reduce(self._weights, divisor if work.averaged else 1.0)
        self._flags.publish(self._row + _DONE, work.index + 1)

    def _refusal(self, entry: int) -> Exception:
        """Why a reduction cannot be done, the same on every rank."""
        rows = self._flags.counters[_HEAD:].reshape(self.size, _ROW)[:, entry : entry + _ENTRY]
        if (rows[:, :3] == rows[0, :3]).all():
            return WeightRefused(np.flatnonzero(np.isnan(rows[:, 3].copy().view(np.float64))).tolist())
        asked = [
            f"rank {rank}: {numel} × {_DTYPES[kind // 2]} at {place >> 48}:{place & (1 << 48) - 1}"
            for rank, (numel, kind, place, _) in enumerate(rows.tolist())
        ]
        return ReplicaMismatch(
            f"rank {self.membership.me}: all-reduce of tensors that differ in length, dtype or place in shared memory: "
            f"{'; '.join(asked)}."
        )

    def _finished(self, index: int) -> bool:
        self._work_ahead()
        return self._flags.reached(self._done, index + 1)

    def _finish(self, index: int) -> None:
        while self._pending and self._pending[0].index <= index:
            self._await(self._ready, self._pending[0].index + 1)
            self._add_up(self._pending.popleft())
        self._await(self._done, index + 1)

    def _await(self, slots: np.ndarray, value: int) -> None:
        if self._flags.wait(slots, value, _CHECK_SECONDS):
            return
        patience = self.timeout.total_seconds()
        deadline, beats = time.monotonic() + patience, self._beats()
        while not self._flags.wait(slots, value, _CHECK_SECONDS):
            if self._closed or self.inner.closed:
                raise self.inner.conversation.closed_meanwhile()
            gone = self.membership.gone() or self._closed_ranks() or self.inner.conversation.lost_ranks()
            if gone and not self._flags.reached(slots, value):  # It may have gone after doing its part.
                raise self.membership.loss(gone)
            if beats != self._beats():  # Somebody is waiting for others, and they are on their way.
                deadline, beats = time.monotonic() + patience, self._beats()
            elif time.monotonic() > deadline:
                late = self._names(np.flatnonzero(self._flags.counters[slots] < value))
                raise self.membership.overdue(
                    f"rank {', '.join(map(str, late))} to take part in all-reduce {value - 1}"
                )

    def await_counters(self, flags: Flags, slots: np.ndarray, value: int, ranks: Sequence[int], deed: str) -> None:
        """Wait until all `slots` hold `value`, as long as the `ranks` that write them live and the timeout lasts."""
        if flags.wait(slots, value, _CHECK_SECONDS):
            return
        deadline = time.monotonic() + self.timeout.total_seconds()
        while not flags.wait(slots, value, _CHECK_SECONDS):
            self.check_open()
            late = [ranks[index] for index in np.flatnonzero(flags.counters[slots] < value).tolist()]
            lost = {self.membership.peers[rank].rank: why for rank in late if (why := self._how_gone(rank)) is not None}
            if lost and not flags.reached(slots, value):  # It may have gone after doing its part.
                raise self.membership.loss(self.membership.gone() or lost)
            if time.monotonic() > deadline:
                names = ", ".join(str(self.membership.peers[rank].rank) for rank in late)
                raise self.membership.overdue(f"rank {names} to {deed}")

    def _how_gone(self, rank: int) -> str | None:
        """How it is known that a rank will answer here no more, if it is."""
        if rank == self.rank:
            return None
        return self.membership.how_gone(self.membership.peers[rank]) or self.inner.conversation.said_by(rank)

    def report_progress(self) -> None:
        """Tell those who wait for this rank that it goes on, slowly."""
        self._flags.counters[self._row + _BEATS] += 1

    def _beats(self) -> int:
        return int(self._flags.counters[self._ready + (_BEATS - _READY)].sum())

    def _closed_ranks(self) -> dict[int, str]:
        closed = self._names(np.flatnonzero(self._flags.counters[self._ready + (_CLOSED - _READY)]))
        return {rank: "it has closed this conversation" for rank in closed if rank != self.membership.me}

    def _names(self, ranks: np.ndarray) -> list[int]:
        return [self.membership.peers[rank].rank for rank in ranks.tolist()]


def _map_all(membership: Membership, name: str, num_bytes: int) -> list[_Memory]:
    """Give every rank `num_bytes` of memory and map everyone's. Collective."""
    file = os.memfd_create("tutti")
    try:
        os.ftruncate(file, num_bytes)
        membership.store.set(f"{name}/at/{membership.rank}", f"{os.getpid()} {file}")
        membership.await_keys([f"{name}/at/{rank}" for rank in range(membership.size)], "memory of all ranks")
        memories = [_open(membership, name, rank, num_bytes) for rank in range(membership.size)]
        membership.store.set(f"{name}/mapped/{membership.rank}", "1")
        membership.await_keys([f"{name}/mapped/{rank}" for rank in range(membership.size)], "all ranks to map memory")
    finally:
        os.close(file)
    return memories


def _open(membership: Membership, name: str, rank: int, num_bytes: int) -> _Memory:
    pid, number = membership.store.get(f"{name}/at/{rank}").split()
    try:
        file = os.open(f"/proc/{int(pid)}/fd/{int(number)}", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise membership.explain(error) from error
    try:
        if os.fstat(file).st_size != num_bytes:
            raise ReplicaMismatch(
                f"rank {membership.me}: asked for {num_bytes} bytes of shared memory where rank {rank} asked for "
                f"{os.fstat(file).st_size}: the ranks' models differ."
            )
        return _Memory(file, num_bytes)
    finally:
        os.close(file)
