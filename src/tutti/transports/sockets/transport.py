"""Sockets and torch's own process groups as one transport: Gloo sums between any hosts, NCCL between GPUs.

Messages do not go through Gloo, which cannot say whether one has arrived, nor stop waiting for it. Groups are built
directly on a store, never through torch's default group, so a script may use
`torch.distributed` for itself and several generations or channels can live side by side.
"""

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.cluster.hosts import LOOPBACK
from tutti.errors import ConfigError, DeadlineExceeded, RankLost
from tutti.transports.background import Background
from tutti.transports.base import ANY, Operation, Transport, Work
from tutti.transports.event_loop import Driven, Loop
from tutti.transports.membership import WATCH_SECONDS, ChannelMembership, Membership
from tutti.transports.sockets.messenger import Messenger, Receiving

_WIDER = {torch.int16: torch.int32, torch.bool: torch.int32}
"""What Gloo cannot add, and what it is added in: it wraps, or is true, as it would have been."""


class GroupWork(Work):
    """A torch work object."""

    def __init__(self, work: dist.Work, membership: Membership, then: Callable[[], object] = lambda: None) -> None:
        self._work: dist.Work | None = work
        self._membership = membership
        self._then = then
        self._error: Exception | None = None

    def done(self) -> bool:
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        if self._error is not None:
            raise self._error
        if self._work is None:
            return
        work, self._work = self._work, None
        try:
            work.wait(self._membership.timeout)
        except RuntimeError as error:
            self._error = self._membership.explain(error)
            raise self._error from error
        finally:
            del work  # It holds the group's sockets open, and the traceback would hold it: others would wait on.
        self._then()


class _Connecting(threading.Thread):
    """Gloo's connecting, which does not look up: who waits for it can go on without, and it ends by its deadline."""

    def __init__(self, make: Callable[[], Any], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._make = make
        self.over = threading.Event()
        self.made: Any = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.made = self._make()
        except Exception as error:  # Whatever it is, whoever waits is told.
            self.error = error
        self.over.set()


class _Staged(Work):
    """A message received in host memory, for a tensor that is elsewhere or laid out otherwise."""

    def __init__(self, receiving: Receiving, tensor: Tensor) -> None:
        self._receiving: Receiving | None = receiving
        self._host, self._tensor = receiving.tensor, tensor

    def done(self) -> bool:
        return self._receiving is None or self._receiving.done()

    def wait(self) -> None:
        if self._receiving is not None:
            self._receiving.wait()
            self._source = self._receiving.peer
            self._receiving = None
            self._tensor.copy_(self._host)

    @property
    def source(self) -> int:
        self.wait()
        return self._source


class SocketTransport(Transport):
    """Messages over TCP; sums by Gloo, or by NCCL where each rank has a GPU of its own."""

    def __init__(self, membership: Membership, *, address: str = LOOPBACK, name: str = "tutti") -> None:
        """Talk to every rank of `membership`. Connections are made when they are needed.

        Args:
            address: where to listen: an address of this host.
            name: distinguishes the conversation from others on the same store.
        """
        self.rank, self.size, self.hosts = membership.rank, membership.size, membership.hosts
        self.world_rank = membership.me
        self.timeout, self.bytes_sent = membership.timeout, 0
        self.membership = membership
        self.name = name
        self._address = address
        self._store = dist.PrefixStore(name, membership.store)
        self._messenger = Messenger(membership, address, name)
        self._background = Background(f"rank {membership.me}")
        self._loop = Loop(f"rank {membership.me}", self._messenger, membership.timeout.total_seconds())
        self._gloo: Any = None  # torch's stubs know neither its methods nor its options.
        self._nccl: Any = None
        self._own_gpu: bool | None = None
        self.closed = False
        self._num_channels: Counter[str] = Counter()
        self._channels: list[SocketTransport] = []

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        self.membership.check_peer(dst)
        self.bytes_sent += tensor.nbytes
        return self._messenger.send(tensor.detach().contiguous().cpu(), dst, tag)

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Work:
        if src != ANY:
            self.membership.check_peer(src)
        if tensor.is_contiguous() and tensor.device.type == "cpu":
            return self._messenger.receive(tensor, src, tag)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return _Staged(self._messenger.receive(host, src, tag), tensor)

    def all_reduce(self, tensor: Tensor) -> Work:
        self._check_open()
        self.bytes_sent += 2 * (self.size - 1) * tensor.nbytes // self.size
        if tensor.is_cuda and self._has_own_gpu(tensor):
            return self._reduce(self._connect_nccl(tensor), tensor)
        data = tensor.detach().to(_WIDER.get(tensor.dtype, tensor.dtype)).contiguous()
        flat = torch.view_as_real(data) if data.is_complex() else data
        if data.data_ptr() == tensor.data_ptr():
            return self._reduce(self._connect_gloo(), flat)
        return self._reduce(self._connect_gloo(), flat, lambda: tensor.copy_(data))

    def channel(self, name: str, ranks: Sequence[int] | None = None) -> "SocketTransport":
        self._check_open()
        membership = self.membership if ranks is None else self.membership.subset(ranks)
        if ranks is not None:
            name += f"[{','.join(map(str, ranks))}]"
        self._num_channels[name] += 1
        full_name = f"{self.name}/{name}.{self._num_channels[name]}"
        made = SocketTransport(membership, address=self._address, name=full_name)
        self._channels = [*(channel for channel in self._channels if not channel.closed), made]
        return made

    def start(self, operation: Operation) -> Work:
        return self._background.start(operation)

    def spawn(self, operation: Operation, *, deadline: bool = True) -> Work:
        self._messenger.serves = True
        return self._loop.add(operation, deadline)

    def spawn_inline(self, operation: Operation) -> Driven:
        """As `spawn` without a deadline; but the caller takes the steps that need not wait."""
        self._messenger.serves = True
        return self._loop.add_here(operation)

    def interrupt(self) -> None:
        self.closed = True
        self._background.interrupt()
        self._loop.interrupt()
        self._messenger.interrupt()
        for channel in self._channels:
            channel.interrupt()

    def shared(self) -> Transport:
        if not hasattr(os, "memfd_create"):
            return self
        from tutti.transports.shared_memory.transport import SharedMemoryTransport  # Costs a compiler's import.

        return SharedMemoryTransport(self)

    def close(self) -> None:
        self.interrupt()
        self._background.close()  # Its steps may use channels too.
        self._loop.close()
        for channel in self._channels:
            channel.close()
        self._messenger.close()
        if self._nccl is not None:
            self._nccl.shutdown()
            self._nccl = None
        # Dropping the last reference closes the sockets: peers that wait for this rank fail at once.
        self._gloo = None

    @property
    def conversation(self) -> ChannelMembership:
        return self._messenger.conversation

    def on_progress(self, call: Callable[[], None]) -> None:
        """Have `call` called now and then while a wait for a message is long but data moves."""
        self._messenger.on_progress = call

    def _check_open(self) -> None:
        if self.closed:
            raise ConfigError(f"rank {self.membership.me}: this transport is closed.")

    def _reduce(self, group: Any, tensor: Tensor, then: Callable[[], object] = lambda: None) -> Work:
        try:
            return GroupWork(group.allreduce([tensor]), self.membership, then)
        except RuntimeError as error:
            raise self.membership.explain(error) from error

    def _connect_gloo(self) -> Any:
        """Gloo's group, made by all ranks together when they first reduce."""
        if self._gloo is None:
            self._agree_to_connect()
            connecting = _Connecting(self._make_gloo, f"rank {self.membership.me} connects")
            while not connecting.over.wait(WATCH_SECONDS):
                if gone := self.membership.gone():
                    raise self.membership.loss(gone)
            if connecting.error is not None:
                raise self.membership.explain(connecting.error) from connecting.error
            self._gloo = connecting.made
        return self._gloo

    def _make_gloo(self) -> Any:
        make: Any = dist.ProcessGroupGloo
        options = make._Options()
        options._timeout = self.timeout
        options._threads = 2
        options._devices = [make.create_device(hostname=self._address)]
        return make(self._store, self.rank, self.size, options)

    def _agree_to_connect(self) -> None:
        """Wait for all ranks. Who finds that they will not come decides so for all, unless all have come meanwhile.

        A rank that came, and left alone while its process lives on, would keep the others until their deadline.
        """
        failure: Exception | None = None
        self._store.set(f"gloo/{self.rank}", "1")
        keys = [f"{self.name}/gloo/{rank}" for rank in range(self.size)]
        try:
            self.membership.await_keys(keys, "all ranks to take part in an all-reduce", self._lost)
        except (RankLost, DeadlineExceeded) as error:
            failure = error
        if self._store.compare_set("gloo/verdict", "", "stop" if failure else "go") == b"stop":
            raise failure or self.membership.loss(self._lost(), "another rank would not wait any longer")

    def _lost(self) -> dict[int, str]:
        if self.closed:
            raise self.conversation.closed_meanwhile()
        return self.conversation.lost_ranks()

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
            self.membership.await_keys(keys, "the GPUs of all ranks")
            gpus = [self.membership.store.get(key) for key in keys]
            self._own_gpu = b"none" not in gpus and len(set(gpus)) == self.size
        return self._own_gpu
