"""Process groups of torch.distributed whose ranks are threads: Gloo's, and Tutti's on every transport."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import tutti.transports.shared_memory.transport  # noqa: F401  Compiled here, not inside a test's deadline.
from tutti.backend import GroupConnection, group_over
from tutti.coordination import LocalCoordinator, MemberDescription
from tutti.transports import Membership, Peer, SingleRankTransport, SocketTransport
from tutti.transports.hosts import shared_where_possible

TIMEOUT = timedelta(seconds=20)


def gloo(rank: int, size: int, store: dist.Store, timeout: timedelta) -> Any:
    make: Any = dist.ProcessGroupGloo
    options = make._Options()
    options._timeout, options._threads = timeout, 1
    options._devices = [make.create_device(hostname="127.0.0.1")]
    return make(dist.PrefixStore("gloo", store), rank, size, options)


def tutti_group(hosts: int) -> Callable[..., Any]:
    """A maker of Tutti's groups, of ranks that are on so many hosts."""

    def make(rank: int, size: int, store: dist.Store, timeout: timedelta) -> Any:
        names = [f"host{number * min(hosts, size) // size}" for number in range(size)]
        membership = store.membership(rank, names, timeout)
        if size == 1:
            return group_over(GroupConnection(SingleRankTransport(timeout), 0, lambda: None))
        return group_over(GroupConnection(shared_where_possible(SocketTransport(membership)), rank, membership.leave))

    return make


class ThreadStore(dist.HashStore):  # type: ignore[misc]
    """Where ranks that are threads meet: a store for Gloo, a coordinator for Tutti."""

    def __init__(self) -> None:
        super().__init__()
        self._coordinator = LocalCoordinator()

    def membership(self, rank: int, hosts: list[str], timeout: timedelta) -> Membership:
        """The ranks on these hosts, of which the caller is `rank`."""
        mine = MemberDescription.this_process(rank, hosts[rank], hosts[rank])
        member = self._coordinator.member(mine)
        found = member.join("group", rank, len(hosts), timeout.total_seconds())
        assert found is not None
        return Membership(rank, [Peer(number, each) for number, each in enumerate(found)], member, "group", timeout)


GROUPS = {"memory": tutti_group(1), "sockets": tutti_group(100), "hosts": tutti_group(2)}
"""On one host, on a host each, and on two hosts."""


def on_ranks(
    make: Callable[..., Any], size: int, function: Callable[[Any], Any], timeout: timedelta = TIMEOUT
) -> list[Any]:
    """`function(group)` on every rank, in a thread each; what they returned, or the exceptions they raised."""
    store = ThreadStore()
    results: list[Any] = [None] * size

    def work(rank: int) -> None:
        group = make(rank, size, store, timeout)
        try:
            results[rank] = function(group)
        except Exception as error:
            results[rank] = error
        finally:
            group.shutdown()

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
        assert not thread.is_alive(), f"{thread.name} hangs; so far: {results}"
    return results
