"""torch's own process groups as a transport: Gloo between any hosts, NCCL between GPUs.

Groups are built directly on a store, never through torch's default group, so a script may use
`torch.distributed` for itself and several generations or channels can live side by side.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.errors import ConfigError
from tutti.transports.base import ANY, Transport, Work
from tutti.transports.roster import Roster

LOOPBACK = "127.0.0.1"
"""Where a run on one host listens."""


class _GroupWork(Work):
    """A torch work object; CUDA tensors that Gloo cannot send are staged through `host`."""

    def __init__(self, work: dist.Work, roster: Roster, tensor: Tensor, host: Tensor | None = None) -> None:
        self._work: dist.Work | None = work
        self._roster = roster
        self._tensor = tensor
        self._host = host

    def done(self) -> bool:
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        if self._work is None:
            return
        work, self._work = self._work, None  # Kept no longer than needed: it holds the group's sockets open.
        try:
            work.wait(self._roster.timeout)
        except RuntimeError as error:
            raise self._roster.explain(error) from error
        if self._host is not None:
            self._tensor.copy_(self._host)


class _ReceiveFromAny(_GroupWork):
    """A receive that learns its source by finishing."""

    def wait(self) -> None:
        work = self._work
        super().wait()
        if work is not None:
            self._source = work._source_rank()

    @property
    def source(self) -> int:
        self.wait()
        return self._source


class ProcessGroupTransport(Transport):
    """Gloo for CPU tensors and for ranks that share a GPU, NCCL where each rank has its own GPU."""

    def __init__(self, roster: Roster, *, address: str | None = LOOPBACK, name: str = "tutti") -> None:
        """Connect to every rank of `roster`.

        Args:
            address: where to listen: an address of this host, or None to let torch choose (it then
                honours GLOO_SOCKET_IFNAME).
            name: distinguishes the group from others on the same store.
        """
        self.rank, self.size = roster.rank, roster.size
        self.timeout, self.bytes_sent = roster.timeout, 0
        self.roster = roster
        self._address = address
        self.name = name
        self._store = dist.PrefixStore(name, roster.store)
        self._gloo: Any = self._connect_gloo()  # torch's stubs know neither its methods nor its options.
        self._nccl: Any = None
        self._own_gpu: bool | None = None
        self._num_channels = 0
        self._channels: WeakSet[ProcessGroupTransport] = WeakSet()

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        self._check_peer(dst)
        self.bytes_sent += tensor.nbytes
        data = tensor.detach().contiguous().cpu()
        return _GroupWork(self._start(self._group.send, [data], dst, tag), self.roster, data)

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Work:
        direct = tensor.is_contiguous() and tensor.device.type == "cpu"
        data = tensor if direct else torch.empty(tensor.shape, dtype=tensor.dtype)
        host = None if direct else data
        if src == ANY:
            return _ReceiveFromAny(self._start(self._group.recv_anysource, [data], tag), self.roster, tensor, host)
        self._check_peer(src)
        return _GroupWork(self._start(self._group.recv, [data], src, tag), self.roster, tensor, host)

    def all_reduce(self, tensor: Tensor) -> Work:
        self.bytes_sent += 2 * (self.size - 1) * tensor.nbytes // self.size
        if tensor.is_cuda and self._has_own_gpu(tensor):
            return _GroupWork(self._start(self._connect_nccl(tensor).allreduce, [tensor]), self.roster, tensor)
        if tensor.is_complex():
            return self.all_reduce(torch.view_as_real(tensor))
        return _GroupWork(self._start(self._group.allreduce, [tensor]), self.roster, tensor)

    def channel(self, name: str) -> "ProcessGroupTransport":
        self._num_channels += 1
        full_name = f"{self.name}/{name}.{self._num_channels}"
        made = ProcessGroupTransport(self.roster, address=self._address, name=full_name)
        self._channels.add(made)
        return made

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        if self._nccl is not None:
            self._nccl.shutdown()
            self._nccl = None
        # Dropping the last reference closes the sockets: peers that wait for this rank fail at once.
        self._gloo = None

    def _connect_gloo(self) -> Any:
        make: Any = dist.ProcessGroupGloo
        options = make._Options()
        options._timeout = self.timeout
        options._threads = 2
        options._devices = [
            make.create_default_device() if self._address is None else make.create_device(hostname=self._address)
        ]
        try:
            return make(self._store, self.rank, self.size, options)
        except RuntimeError as error:
            raise self.roster.explain(error) from error

    def _connect_nccl(self, tensor: Tensor) -> Any:
        if self._nccl is None:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self.timeout
            store = dist.PrefixStore("nccl", self._store)
            torch.cuda.set_device(tensor.device)
            self._nccl = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
        return self._nccl

    def _has_own_gpu(self, tensor: Tensor) -> bool:
        """Whether every rank's tensors are on a GPU that no other rank uses. Asked once, by all ranks together."""
        if self._own_gpu is None:
            mine = torch.cuda.get_device_properties(tensor.device).uuid if dist.is_nccl_available() else "none"
            self._store.set(f"gpu/{self.rank}", str(mine))
            keys = [f"{self.name}/gpu/{rank}" for rank in range(self.size)]
            self.roster.await_keys(keys, "the GPUs of all ranks")
            gpus = [self.roster.store.get(key) for key in keys]
            self._own_gpu = b"none" not in gpus and len(set(gpus)) == self.size
        return self._own_gpu

    def _check_peer(self, rank: int) -> None:
        if not 0 <= rank < self.size or rank == self.rank:
            raise ConfigError(f"rank {self.rank}: no peer {rank} in a world of {self.size}.")

    @property
    def _group(self) -> Any:
        if self._gloo is None:
            raise ConfigError(f"rank {self.rank}: this transport is closed.")
        return self._gloo

    def _start(self, operation: Callable[..., dist.Work], *args: object) -> dist.Work:
        try:
            return operation(*args)
        except RuntimeError as error:
            raise self.roster.explain(error) from error
