"""The shared-memory transport: all-reduces between ranks of one host without copies.

How it works
------------
Tensors allocated by `empty` lie in memory that every rank maps (`segments`). Gradients live there, so a reduction reads
and writes them in place: `all_reduce` has the algorithm, `counters` the page by which ranks see how far the others are,
`flags` the waiting, `liveness` the detection of lost ranks. Messages, GPU tensors and operations go through `inner`.

Closing: `interrupt` sets this rank's `closed` counter, which ends the waits of peers for it, and the flag that ends its
own waits. `close` then closes `inner`, which joins its threads, and only after that drops the references to memory that
those threads may have used.
"""

from collections.abc import Sequence
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from tutti.errors import ConfigError
from tutti.transports.base import TransportWrapper, Work
from tutti.transports.shared_memory.all_reduce import STAGING_BYTES, SharedMemoryReductions
from tutti.transports.shared_memory.counters import RankCounters
from tutti.transports.shared_memory.flags import Flags, spins_for
from tutti.transports.shared_memory.liveness import ChannelLiveness
from tutti.transports.shared_memory.segments import SharedSegments
from tutti.transports.sockets.transport import SocketTransport


class SharedMemoryTransport(TransportWrapper):
    """Ranks of one host: sums in place in shared memory, messages and GPU tensors through `inner`."""

    inner: SocketTransport

    def __init__(self, inner: SocketTransport) -> None:
        """Map the counters and the staging buffers of all ranks of `inner`. Collective."""
        self.inner = inner
        self.membership = inner.membership
        # All ranks have the same list of peers, so all of them refuse, and none waits for memory of another host.
        if not self.membership.one_host:
            hosts = sorted({peer.host for peer in self.membership.peers})
            raise ConfigError(f"shared memory reaches one host only, but the ranks are on {', '.join(hosts)}.")
        self.rank, self.size, self.hosts, self.timeout = inner.rank, inner.size, inner.hosts, inner.timeout
        name = f"{inner.name}/memory"
        self._segments = SharedSegments(self.membership, name)
        page, staging = self._segments.with_page(RankCounters.page_bytes(self.size), STAGING_BYTES)
        self._counters = RankCounters(page, self.rank, self.size, spins_for(self.size))
        self._liveness = ChannelLiveness(inner, self._counters)
        self._reductions = SharedMemoryReductions(
            self.membership, self._counters, self._liveness, self._segments, staging
        )
        self._channels: WeakSet[SharedMemoryTransport] = WeakSet()

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        """Bytes of messages sent, and of tensors that were reduced in memory."""
        return self.inner.bytes_sent + self._reductions.reduced_bytes

    def channel(self, name: str, ranks: Sequence[int] | None = None) -> "SharedMemoryTransport":
        made = SharedMemoryTransport(self.inner.channel(name, ranks))
        self._channels.add(made)
        return made

    def interrupt(self) -> None:
        # Seen by peers before anything else is closed: their waits for this rank end.
        if not self._liveness.closed:
            self._counters.close()
        self._liveness.closed = True
        for channel in self._channels:
            channel.interrupt()
        self.inner.interrupt()

    def close(self) -> None:
        self.interrupt()
        self.inner.close()  # From here on no other thread uses this transport.
        for channel in self._channels:
            channel.close()
        self._reductions.close()

    # Memory

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate a flat CPU tensor that every rank can reach, for reductions in place. Collective."""
        return self._segments.empty(numel, dtype)

    def shared_tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate one flat CPU tensor of zeros that all ranks map. Collective."""
        return self._segments.shared_tensor(numel, dtype)

    def per_rank_tensors(self, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Allocate one flat CPU tensor per rank; every rank maps all of them. Collective."""
        return self._segments.per_rank_tensors(numel, dtype)

    def flags(self, num_slots: int) -> Flags:
        """Allocate counters that every rank can change; the first 16 are reserved. Collective."""
        return Flags(self.shared_tensor(num_slots, torch.int64).numpy(), spins_for(self.size))

    # Peers

    def missing(self) -> dict[int, str]:
        """Ranks of this channel (not world ranks) that will answer here no more, and how that is known."""
        return self._liveness.missing()

    def abort(self) -> None:
        """Tell the peers that this rank cannot continue here, so that none waits for it."""
        self.inner.channel_membership.abort()

    def check_open(self) -> None:
        """Raise `RankLost` if this channel was closed here while the caller waited."""
        self._liveness.check_open()

    def report_progress(self) -> None:
        """Restart the deadline of the ranks that wait for this one: it is slow, but alive and working."""
        self._counters.report_progress()

    def await_counters(self, flags: Flags, slots: np.ndarray, value: int, ranks: Sequence[int], action: str) -> None:
        """Wait until all `slots` of `flags` hold `value`, as long as the `ranks` that write them can answer."""
        self._liveness.await_counters(flags, slots, value, ranks, action)

    # Reductions

    def all_reduce(self, tensor: Tensor) -> Work:
        """Replace `tensor` by its sum over ranks."""
        if tensor.is_cuda:
            return self.inner.all_reduce(tensor)
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return self._reductions.reduce(real, 1.0, averaged=False)

    def average(self, tensor: Tensor, weight: float) -> Work:
        """Replace `tensor` by its weighted mean over ranks. Raises `ConfigError` for integer tensors."""
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise ConfigError(
                f"rank {self.membership.world_rank}: the mean of {tensor.dtype} tensors is not an integer; use a sum."
            )
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return self._reductions.reduce(real, weight, averaged=True)

    def broadcast(self, tensor: Tensor) -> Work:
        """Overwrite `tensor` on every rank with rank 0's."""
        if tensor.is_cuda:
            raise ConfigError(f"rank {self.membership.world_rank}: only CPU tensors can be broadcast in shared memory.")
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        # The sum in which only rank 0 has a weight: ranks of weight 0 are not even read.
        return self._reductions.reduce(real, float(self.rank == 0), averaged=False)
