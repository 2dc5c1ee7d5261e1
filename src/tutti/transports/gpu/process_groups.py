"""All-reduces by torch's own process groups: NCCL between GPUs, Gloo where ranks share a GPU or have none.

How it works
------------
The groups are built directly on a store of the job's own, never through torch's default group. So a script may use
`torch.distributed` for itself, and several generations and channels live side by side. A group is made by the first
all-reduce that needs it, which all ranks start together.

NCCL refuses two ranks on one GPU. So before the first all-reduce of a CUDA tensor all ranks exchange the identifiers of
their GPUs through the coordinator, and use NCCL only if every rank has one of its own. Gloo sums on the CPU.

Gloo cannot be interrupted: neither while it connects, nor while it sums. Three things keep a lost rank from blocking
the others until Gloo's timeout:

- Ranks agree through the coordinator before they connect (`_agree_to_connect`). Each announces itself and waits for
  all. A rank that finds another one lost proposes "stop", one that saw all proposes "go"; the first proposal counts
  for everybody. So either all ranks connect, or none does.
- Connecting runs in a thread of its own (`_ConnectThread`), while the caller watches whether ranks are gone.
- A work that failed is dropped at once: it holds the group's sockets, and the peers wait until those are closed. That
  is also why `close` drops the group: its sockets close with the last reference, and peers that wait fail.
"""

import math
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.errors import DeadlineExceeded, RankLost
from tutti.transports.base import Work
from tutti.transports.membership import (
    EXPLAIN_SECONDS,
    WATCH_SECONDS,
    ChannelMembership,
    Membership,
)
from tutti.transports.torch_store import torch_store

_GLOO_SUM_DTYPES = {torch.int16: torch.int32, torch.bool: torch.int32}
"""Dtypes that Gloo cannot add, and the wider ones they are added in. Converting back wraps as torch would."""


class TorchGroupWork(Work):
    """A work of a torch process group, and what to do with its result."""

    def __init__(
        self, work: dist.Work, membership: Membership, on_success: Callable[[], object] = lambda: None
    ) -> None:
        """Wrap `work`; call `on_success` after it has succeeded, in the thread that waits."""
        self._work: dist.Work | None = work
        self._membership = membership
        self._on_success = on_success
        self._error: Exception | None = None

    def done(self) -> bool:
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        if self._error is not None:
            raise self._error
        if self._work is None:
            return
        # Taken out first: a second `wait` must not touch it again, also after a failure.
        work, self._work = self._work, None
        try:
            self._watch(work)
            work.wait(self._membership.timeout)
        except RuntimeError as error:
            self._error = self._membership.explain_error(error)
            raise self._error from error
        finally:
            del work  # It holds the group's sockets open. The traceback would hold it, and the peers would wait on.
        self._on_success()

    def _watch(self, work: dist.Work) -> None:
        """Wait until Gloo has ended, which it does not when a peer is stopped: only its membership tells that."""
        membership, started, pause_s = self._membership, time.monotonic(), 1e-5
        check_at, lost_since = started + WATCH_SECONDS, math.inf
        with ExitStack() as stack:
            while not work.is_completed() and (now := time.monotonic()) - started < membership.timeout.total_seconds():
                if now > check_at:
                    if check_at == started + WATCH_SECONDS:
                        others = [peer.process.rank for peer in membership.peers if peer.rank != membership.world_rank]
                        action, activity = "take part in an all-reduce by Gloo", membership.member.activity
                        stack.enter_context(activity.waiting(others, action, observed=False))
                    check_at = now + WATCH_SECONDS
                    membership.member.check()
                    # A rank may do its part and leave: what it sent is still under way.
                    gone = membership.gone()
                    lost_since = min(lost_since, now) if gone else math.inf
                    if now - lost_since > EXPLAIN_SECONDS:
                        raise membership.loss_error(gone)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.001)


class _ConnectThread(threading.Thread):
    """Connects a Gloo group, which nothing interrupts; the caller may stop waiting, and it ends by its own timeout."""

    def __init__(self, make: Callable[[], Any], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._make = make
        self.over = threading.Event()
        self.group: Any = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.group = self._make()
        except Exception as error:  # Whatever it is, the waiting caller raises it.
            self.error = error
        self.over.set()


class TorchProcessGroups:
    """The NCCL and the Gloo group of one channel, made when they are needed."""

    def __init__(self, channel_membership: ChannelMembership, name: str) -> None:
        """Prepare groups; `name` identifies the channel in the membership's scope."""
        self._membership = channel_membership.membership
        self._channel_membership = channel_membership
        self._name = name
        self._torch_store: dist.Store | None = None
        self.gloo: Any = None  # torch's stubs know neither its methods nor its options.
        self.nccl: Any = None
        self.one_gpu_per_rank: bool | None = None
        """Whether each rank has a GPU of its own; None before the first all-reduce of a CUDA tensor."""
        self.closed = False
        """Set when the transport is interrupted: ends the wait for other ranks to connect."""

    def all_reduce(self, tensor: Tensor) -> Work:
        """Replace `tensor` by its sum over ranks. The first call connects, on all ranks together."""
        # All ranks take the same branch: `_has_one_gpu_per_rank` compares what all of them published.
        if tensor.is_cuda and self._has_one_gpu_per_rank(tensor):
            return self._reduce(self._connect_nccl(tensor), tensor)
        data = tensor.detach().to(_GLOO_SUM_DTYPES.get(tensor.dtype, tensor.dtype)).contiguous()
        # A sum of complex numbers is the sum of their real and imaginary parts, which Gloo can add.
        flat = torch.view_as_real(data) if data.is_complex() else data
        # No copy was needed: Gloo sums in the caller's memory. Otherwise the sum is copied back when it is waited for.
        if data.data_ptr() == tensor.data_ptr():
            return self._reduce(self._connect_gloo(), flat)
        return self._reduce(self._connect_gloo(), flat, lambda: tensor.copy_(data))

    def close(self) -> None:
        """Shut the groups down."""
        if self.nccl is not None:
            self.nccl.shutdown()
            self.nccl = None
        # Dropping the last reference closes the sockets: peers that wait for this rank fail at once.
        self.gloo = None

    def _reduce(self, group: Any, tensor: Tensor, on_success: Callable[[], object] = lambda: None) -> Work:
        try:
            return TorchGroupWork(group.allreduce([tensor]), self._membership, on_success)
        except RuntimeError as error:
            raise self._membership.explain_error(error) from error

    def _connect_gloo(self) -> Any:
        """Return the Gloo group, made when it is first asked for. Raises `RankLost` if a rank is gone."""
        if self.gloo is None:
            self._agree_to_connect()
            connecting = _ConnectThread(self._make_gloo, f"rank {self._membership.world_rank} connects")
            # If a rank is lost now, the thread is left behind; it ends by Gloo's own timeout.
            while not connecting.over.wait(WATCH_SECONDS):
                if gone := self._membership.gone():
                    raise self._membership.loss_error(gone)
            if connecting.error is not None:
                raise self._membership.explain_error(connecting.error) from connecting.error
            self.gloo = connecting.group
        return self.gloo

    def _make_gloo(self) -> Any:
        make: Any = dist.ProcessGroupGloo
        options = make._Options()
        options._timeout = self._membership.timeout
        # Torch's default.
        options._threads = 2
        options._devices = [make.create_device(hostname=self._membership.address)]
        store = dist.PrefixStore("gloo", self._store())
        return make(store, self._membership.rank, self._membership.size, options)

    def _store(self) -> dist.Store:
        """The store that torch's groups of this channel share. Collective when first called."""
        if self._torch_store is None:
            self._torch_store = torch_store(self._membership, self._name)
        return self._torch_store

    def _agree_to_connect(self) -> None:
        """Wait until all ranks have come to connect; raise on every rank if one of them found another lost.

        A rank that came, gave up alone and lives on would keep the others waiting until their deadline.
        """
        failure: Exception | None = None
        self._membership.set(f"{self._name}/gloo/{self._membership.rank}", "1")
        keys = [f"{self._name}/gloo/{rank}" for rank in range(self._membership.size)]
        try:
            self._membership.await_values(keys, "all ranks to take part in an all-reduce", self._lost_ranks)
        except (RankLost, DeadlineExceeded) as error:
            failure = error
        # The first to write decides for all: a rank that found all present stops too if another one gave up before.
        mine = "stop" if failure else "go"
        if self._membership.decide(f"{self._name}/gloo/verdict", mine, "a decision to connect") == "stop":
            raise failure or self._membership.loss_error(self._lost_ranks(), "another rank would not wait any longer")

    def _lost_ranks(self) -> dict[int, str]:
        if self.closed:
            raise self._channel_membership.closed_error()
        return self._channel_membership.lost_ranks()

    def _connect_nccl(self, tensor: Tensor) -> Any:
        if self.nccl is None:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._membership.timeout
            # NCCL's identifier goes through the store: its keys must not meet those of Gloo.
            store = dist.PrefixStore("nccl", self._store())
            torch.cuda.set_device(tensor.device)
            self.nccl = dist.ProcessGroupNCCL(store, self._membership.rank, self._membership.size, options)
        return self.nccl

    def _has_one_gpu_per_rank(self, tensor: Tensor) -> bool:
        """Whether every rank's tensors are on a GPU that no other rank uses. Asked once, by all ranks together."""
        if self.one_gpu_per_rank is None:
            # The uuid, not the index: under CUDA_VISIBLE_DEVICES different GPUs may all have the index 0.
            # Published also where NCCL is missing: the peers wait for a key of every rank.
            gpu_id = torch.cuda.get_device_properties(tensor.device).uuid if dist.is_nccl_available() else "none"
            self._membership.set(f"{self._name}/gpu/{self._membership.rank}", str(gpu_id))
            keys = [f"{self._name}/gpu/{rank}" for rank in range(self._membership.size)]
            gpus = self._membership.await_values(keys, "the GPUs of all ranks")
            # One rank without NCCL, or two on one GPU, make all ranks use Gloo.
            self.one_gpu_per_rank = "none" not in gpus and len(set(gpus)) == self._membership.size
        return self.one_gpu_per_rank
