"""The TCP transport: messages over sockets, all-reduces of GPU tensors by torch's NCCL or Gloo groups.

How it works
------------
Each transport, and each channel of it, has a `Messenger` of its own: another listening port and other connections, made
when they are needed. So channels never match or delay each other's messages.

Messages are CPU tensors on the wire. A GPU tensor, or one that is not contiguous, is copied to host memory before it is
sent, and received into host memory and copied by the thread that waits for it.

`start` and `spawn` run operations in two different threads, of which a transport uses at most one.

Closing: `interrupt` sets the flags of messenger, threads and channels, which ends every wait in any thread. Then
`close` joins the threads, which may still use channels, and only after that closes the sockets.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tutti.coordination.activity import Activity
from tutti.errors import ConfigError
from tutti.transports.background import OperationThread
from tutti.transports.base import ANY, Operation, Transport, Work
from tutti.transports.event_loop import DrivableWork, EventLoop
from tutti.transports.gpu.process_groups import TorchProcessGroups
from tutti.transports.membership import ChannelMembership, Membership
from tutti.transports.sockets.messages import SocketReceive
from tutti.transports.sockets.messenger import Messenger
from tutti.transports.sockets.reception import Reception


class _StagedReceive(Work):
    """A receive into host memory for a tensor that is on a GPU, or is not contiguous."""

    def __init__(self, receive: SocketReceive, tensor: Tensor) -> None:
        self._receive: SocketReceive | None = receive
        self._host, self._tensor = receive.tensor, tensor

    def done(self) -> bool:
        return self._receive is None or self._receive.done()

    def wait(self) -> None:
        if self._receive is not None:
            self._receive.wait()
            self._source = self._receive.peer
            # A second wait must not copy again: the caller may have changed the tensor meanwhile.
            self._receive = None
            self._tensor.copy_(self._host)

    @property
    def source(self) -> int:
        self.wait()
        return self._source


class SocketTransport(Transport):
    """Messages over TCP; sums by NCCL where each rank has a GPU of its own, otherwise by Gloo."""

    def __init__(self, membership: Membership, *, name: str = "tutti") -> None:
        """Join every rank of `membership`. Connections are made when they are needed.

        Args:
            name: identifies the channel in the membership's scope.
        """
        self.rank, self.size, self.hosts = membership.rank, membership.size, membership.hosts
        self.world_ranks = membership.world_ranks
        self.timeout, self.bytes_sent = membership.timeout, 0
        self.membership = membership
        self.name = name
        self._messenger = Messenger(membership, name)
        self._thread = OperationThread(f"rank {membership.world_rank}", membership.member.activity)
        self._loop = EventLoop(f"rank {membership.world_rank}", self._messenger, membership.timeout.total_seconds())
        self._torch_groups = TorchProcessGroups(self._messenger.channel_membership, name)
        self.closed = False
        self._num_channels: Counter[str] = Counter()
        self._channels: list[SocketTransport] = []

    @property
    def channel_membership(self) -> ChannelMembership:
        """Which ranks have closed or aborted this channel."""
        return self._messenger.channel_membership

    @property
    def activity(self) -> Activity:
        return self.membership.member.activity

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        self.membership.check_peer(dst)
        self.bytes_sent += tensor.nbytes
        # A copy, where one is made, is kept alive by the send until the kernel has taken it.
        return self._messenger.send(tensor.detach().contiguous().cpu(), dst, tag)

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Work:
        if src != ANY:
            self.membership.check_peer(src)
        if tensor.is_contiguous() and tensor.device.type == "cpu":
            return self._messenger.receive(tensor, src, tag)
        # Sockets write to contiguous memory of the CPU only: the message is staged there, and copied when it is
        # complete.
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return _StagedReceive(self._messenger.receive(host, src, tag), tensor)

    def all_reduce(self, tensor: Tensor) -> Work:
        """Replace `tensor` by its sum over ranks, by NCCL or Gloo."""
        self._check_open()
        # What each rank sends in a ring; NCCL and Gloo do not report it.
        self.bytes_sent += 2 * (self.size - 1) * tensor.nbytes // self.size
        return self._torch_groups.all_reduce(tensor)

    def channel(self, name: str, ranks: Sequence[int] | None = None) -> "SocketTransport":
        self._check_open()
        membership = self.membership if ranks is None else self.membership.subset(ranks)
        if ranks is not None:
            # Disjoint groups may open channels of one name at the same time: the members tell their keys apart.
            name += f"[{','.join(map(str, ranks))}]"
        # The same name may be opened again: all ranks count alike, so the numbered name is the same on all of them.
        self._num_channels[name] += 1
        full_name = f"{self.name}/{name}.{self._num_channels[name]}"
        made = SocketTransport(membership, name=full_name)
        # Channels that the caller has closed are forgotten, so that the list does not grow for ever.
        self._channels = [*(channel for channel in self._channels if not channel.closed), made]
        return made

    def start(self, operation: Operation) -> Work:
        return self._thread.start(operation)

    def spawn(self, operation: Operation, *, deadline: bool = True) -> Work:
        self._messenger.health.tolerates_loss = True
        return self._loop.add(operation, deadline)

    def spawn_inline(self, operation: Operation) -> DrivableWork:
        """As `spawn` without a deadline, but the caller runs the operation until it first has to wait."""
        self._messenger.health.tolerates_loss = True
        return self._loop.add_inline(operation)

    def shared(self) -> Transport:
        """Return this transport with sums in shared memory, or itself where the platform has no memfd. Collective."""
        if not hasattr(os, "memfd_create"):
            return self
        from tutti.transports.shared_memory.transport import SharedMemoryTransport  # It imports a compiler: slow.

        return SharedMemoryTransport(self)

    def listening(self) -> list[Reception]:
        """The listening ports of this transport and its channels."""
        own = [] if self.closed else [self._messenger.connections.reception]
        return own + [port for channel in self._channels for port in channel.listening()]

    def on_progress(self, call: Callable[[], None]) -> None:
        """Call `call` after each wait for a message, and repeatedly during long waits in which data moves."""
        self._messenger.on_progress = call

    def interrupt(self) -> None:
        self.closed = True
        self._torch_groups.closed = True
        self._thread.interrupt()
        self._loop.interrupt()
        self._messenger.interrupt()
        for channel in self._channels:
            channel.interrupt()

    def close(self) -> None:
        self.interrupt()
        self._thread.close()  # Its operations may use channels, which are closed after it.
        self._loop.close()
        for channel in self._channels:
            channel.close()
        self._messenger.close()
        self._torch_groups.close()

    def _check_open(self) -> None:
        if self.closed:
            raise ConfigError(f"rank {self.membership.world_rank}: this transport is closed.")
