"""The MPI transport. Importing this module starts MPI.

How it works
------------
Every channel has a communicator of its own, so its messages match no others. To make one is collective and blocks
without a deadline; so ranks first meet at the coordinator, where waits have deadlines and see lost ranks (`_meet`).

Nothing blocks inside MPI on the caller's thread. There are four threads that may call MPI:

- the caller, which starts requests and tests them (`watch`);
- the thread of `start`, which does the same for operations;
- the event loop of `spawn`, with the `MpiProgressEngine`;
- the reducing thread, which alone makes blocking calls: Open MPI's own `Allreduce`, on a communicator made for it.

That needs MPI_THREAD_MULTIPLE. Without it, operations and reductions run in the caller's thread, and `spawn` is
refused.

`watch` tests a request again and again: at first without pauses, then with pauses that double. It ends when the work is
done; when the channel is closed here; when a peer it depends on has been lost for `GRACE_SECONDS`, as data that it sent
before may still arrive; or after `timeout`.

Closing: receives are cancelled; a send, and a receive that was matched already, cannot be. Their tensors are kept in
`_held`, which all channels share, until the process ends, as MPI may still read or write them. A reduction that does
not return keeps its thread inside MPI. Then `broken` is true, and the launcher aborts MPI instead of finalising it.
Communicators are never freed: that is collective, so it may block where peers are gone, and a late message could
reach the next communicator of the same number. Each takes about 8 KB.
"""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from zlib import crc32

import torch
from mpi4py import MPI
from torch import Tensor

from tutti.coordination.activity import Activity
from tutti.errors import ConfigError, RankLost
from tutti.transports.background import OperationThread
from tutti.transports.base import ANY, CompletedWork, Operation, Transport, Work
from tutti.transports.event_loop import EventLoop
from tutti.transports.membership import WATCH_SECONDS, ChannelMembership, Membership
from tutti.transports.mpi.algorithms import Rules
from tutti.transports.mpi.progress import MpiProgressEngine
from tutti.transports.mpi.works import (
    GRACE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    MpiMessage,
    MpiReceive,
    MpiReduction,
    PolledWork,
)

_SPIN_SECONDS = 0.0002
"""How long a wait tests its request without pauses."""


class MpiTransport(Transport):
    """Messages and reductions over a communicator that holds the ranks of `membership`, in its order."""

    def __init__(self, membership: Membership, comm: Any, *, rules: Rules | None = None, name: str = "tutti") -> None:
        """Communicate over `comm`.

        Args:
            comm: an mpi4py communicator that nothing else uses.
            rules: what is known of how Open MPI reduces, for `native_name`.
            name: identifies the channel in the scope of the membership.
        """
        self.rank, self.size, self.hosts = membership.rank, membership.size, membership.hosts
        self.world_ranks = membership.world_ranks
        self.timeout, self.bytes_sent = membership.timeout, 0
        self.membership = membership
        self.channel_membership = ChannelMembership(membership, name)
        self.rules = rules or Rules()
        self.pending: set[MpiMessage] = set()
        """Messages that MPI has not completed."""
        self._held: list[PolledWork] = []  # What MPI still uses of channels that are closed; shared by all channels.
        self._comm, self._name = comm, name
        # Errors become Python exceptions; by default MPI would end all processes.
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._reduction_comm: Any = None
        self._num_opened: Counter[str] = Counter()
        self._channels: list[MpiTransport] = []
        self._reducing: list[MpiReduction] = []
        self._thread = OperationThread(f"rank {membership.world_rank}", membership.member.activity)
        self._reducer = OperationThread(f"rank {membership.world_rank}, reductions", membership.member.activity)
        engine = MpiProgressEngine(self)
        self._loop = EventLoop(f"rank {membership.world_rank}", engine, membership.timeout.total_seconds())
        self._closed = False
        self._multithreaded = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        if not self._multithreaded and self.rank == 0:
            warnings.warn("this MPI serves one thread only (no MPI_THREAD_MULTIPLE): nothing overlaps.", stacklevel=2)

    @property
    def activity(self) -> Activity:
        return self.membership.member.activity

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        self.membership.check_peer(dst)
        self.bytes_sent += tensor.nbytes
        return self._post(MpiMessage, self._comm.Isend, tensor.detach().contiguous().cpu(), dst, tag)

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Work:
        if src != ANY:
            self.membership.check_peer(src)
        # MPI writes to contiguous CPU memory only. Another tensor is filled from a copy when the receive is waited
        # for.
        direct = tensor.is_contiguous() and tensor.device.type == "cpu"
        data = tensor.detach() if direct else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        message = self._post(MpiReceive, self._comm.Irecv, data, src, tag)
        if not direct:
            message.target = tensor.detach()
        return message

    def all_reduce(self, tensor: Tensor) -> Work:
        """Replace `tensor` by its sum over ranks, by MPI's own `Allreduce`."""
        self._check_open()
        if tensor.is_complex():
            return self.all_reduce(torch.view_as_real(tensor))
        if self.size == 1 or tensor.numel() == 0:
            return CompletedWork()
        # What each rank sends in a ring, as an estimate: MPI does not say which algorithm it uses.
        self.bytes_sent += 2 * (self.size - 1) * tensor.nbytes // self.size
        reduction = MpiReduction(self, tensor.detach())
        # A communicator of its own: its blocking calls run in another thread than the messages of `_comm`.
        if self._reduction_comm is None:
            self._reduction_comm = self._duplicate(f"{self._name}/reductions")
        if not self._multithreaded:
            reduction.run_here(self._reduction_comm)
            return reduction
        # Only those in progress are of interest to `close`.
        self._reducing = [earlier for earlier in self._reducing if not earlier.done()]
        self._reducing.append(reduction)
        reduction.start(self._reducer, self._reduction_comm)
        return reduction

    def native_name(self, num_bytes: int) -> str:
        """The algorithm or component of Open MPI that `all_reduce` uses for `num_bytes`; the vendor of another MPI."""
        vendor = MPI.get_vendor()[0]
        if vendor != "Open MPI":
            return vendor
        return self.rules.name(self.hosts, num_bytes)

    def channel(self, name: str, ranks: Sequence[int] | None = None) -> "MpiTransport":
        self._check_open()
        key = f"{self._name}/{name}" if ranks is None else f"{self._name}/{name}/{'-'.join(map(str, ranks))}"
        # The same name may be opened again: all ranks count alike, so the numbered name is the same on all of them.
        self._num_opened[key] += 1
        full_name = f"{key}.{self._num_opened[key]}"
        membership = self.membership if ranks is None else self.membership.subset(ranks)
        comm = self._duplicate(full_name) if ranks is None else self._select(full_name, membership, ranks)
        made = MpiTransport(membership, comm, rules=self.rules, name=full_name)
        # One list for all channels: a tensor that MPI may still write must outlive every one of them.
        made._held = self._held
        self._channels = [*(channel for channel in self._channels if not channel._closed), made]
        return made

    @property
    def broken(self) -> bool:
        """Whether a thread is still inside MPI after `close`: MPI cannot be ended in order then."""
        return any(isinstance(held, (MpiReduction, MpiReceive)) and not held.done() for held in self._held)

    def start(self, operation: Operation) -> Work:
        self._check_open()
        if self._multithreaded:
            return self._thread.start(operation)
        # All ranks do this in the same order, so the operations of different ranks still meet.
        for work in operation:
            work.wait()
        return CompletedWork()

    def spawn(self, operation: Operation, *, deadline: bool = True) -> Work:
        self._check_open()
        if not self._multithreaded:
            raise ConfigError(
                f"rank {self.world_rank}: this MPI serves one thread only (no MPI_THREAD_MULTIPLE), and nothing can go "
                "on beside training. Use another transport, or an MPI that serves several."
            )
        return self._loop.add(operation, deadline)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for channel in self._channels:
            channel.close()
        self.channel_membership.close()
        # Before requests are cancelled: no other thread may start or test them meanwhile.
        self._thread.close()  # Its waits see that the channel is closed.
        self._loop.close()
        # A copy of the set: `abandon` may complete a message, which removes it from `pending`.
        self._held += [message for message in list(self.pending) if not message.abandon()]
        deadline = time.monotonic() + GRACE_SECONDS
        while (stuck := [work for work in self._reducing if not work.done()]) and time.monotonic() < deadline:
            stuck[0].pause(LONGEST_PAUSE_SECONDS)
        if stuck:  # Nothing ends a blocking call of MPI: its thread stays.
            self._held += stuck
        else:
            self._reducer.close()

    def watch(self, work: PolledWork) -> None:
        """Return when `work` is done; raise when its peers are lost, after the timeout, or when the channel closes."""
        with ExitStack() as stack:
            self._watch(work, stack)

    def _watch(self, work: PolledWork, stack: ExitStack) -> None:
        """Watch `work`; a wait that lasts is reported to others until `stack` is closed."""
        started = checked_at = time.monotonic()
        lost_since, pause, reported = float("inf"), 0.00001, False
        while not work.done():
            now = time.monotonic()
            if self._closed:
                raise self.closed_error()
            if not reported and now - started > WATCH_SECONDS:
                reported = True
                ranks = [self.world_ranks[peer] for peer in work.peers]
                wait = self.activity.waiting(ranks, "reply over MPI", any_of=work.any_peer, observed=False)
                stack.enter_context(wait)
            # Membership is asked for seldom, because it looks at every rank.
            late = now - started > self.timeout.total_seconds()
            if late or now - checked_at > WATCH_SECONDS:
                checked_at, gone = now, self._lost_peers(work)
                self.membership.member.check()
                # When the peers were first found lost: data under way has `GRACE_SECONDS` from then on to arrive.
                lost_since = min(lost_since, now) if gone else float("inf")
                if gone and (late or now - lost_since > GRACE_SECONDS):
                    raise self.membership.loss_error(self.membership.gone() or gone)
                if late:
                    raise self.membership.timeout_error("a reply over MPI")
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            # A sleep of 0 still yields the core, which the peer may need.
            work.pause(0 if now - started < _SPIN_SECONDS else pause)

    def closed_error(self) -> RankLost:
        """The error for work that closing this channel has ended."""
        return RankLost(f"rank {self.membership.world_rank}: this transport was closed with work still to do.")

    def _post(self, kind: type[MpiMessage], start: Callable[..., Any], data: Tensor, peer: int, tag: int) -> MpiMessage:
        """Start a request, and remember it until MPI has completed it."""
        self._check_open()
        try:
            message = kind(self, start, data, peer, tag)
        except MPI.Exception as error:
            raise self.membership.explain_error(error) from error
        self.pending.add(message)
        return message

    def _duplicate(self, name: str) -> Any:
        """Make a communicator of the same ranks. Collective."""
        self._meet(name, self.membership)
        # Blocks inside MPI, but all ranks are on their way here: they have met.
        return self._comm.Dup()

    def _select(self, name: str, membership: Membership, ranks: Sequence[int]) -> Any:
        """Make a communicator of some ranks. Collective among those."""
        self._meet(name, membership)
        # `Create_group` is collective among the members alone. `Split` would need every rank of the communicator.
        group = self._comm.Get_group().Incl(list(ranks))
        # The tag keeps groups apart that are made at the same time. MPI guarantees tags up to 32,767.
        return self._comm.Create_group(group, crc32(name.encode()) % 32_768)

    def _meet(self, name: str, membership: Membership) -> None:
        """Wait until all ranks are there: making a communicator has no deadline."""
        membership.set(f"{name}/came/{membership.world_rank}", "1")
        membership.await_values([f"{name}/came/{peer.rank}" for peer in membership.peers], f"all ranks of '{name}'")

    def _lost_peers(self, work: PolledWork) -> dict[int, str]:
        """The peers of `work` that will not answer, if it cannot do without them."""
        lost = [self.channel_membership.lost(peer) for peer in work.peers]
        reasons = {world_rank: reason for gone in lost for world_rank, reason in gone.items()}
        # A receive from any source fails only when all its peers are lost.
        return reasons if all(lost) or not work.any_peer else {}

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError(f"rank {self.world_rank}: this transport is closed.")
