"""Ranks as threads: the quick way to run several, with explicit groups and nothing global."""

import itertools
import threading
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch

import tutti
import tutti.transports.shared_memory.transport  # Compiled here, not inside a test's deadline.
from tutti.cluster import Cluster, Link
from tutti.coordination import LocalCoordinator, Secret
from tutti.launch.rendezvous import connect
from tutti.simulation.runs.simulate import simulate
from tutti.transports import Membership, Peer, SingleRankTransport
from tutti.world import World

TRANSPORTS = ("sockets", "shared_memory")

SIMULATED = ("simulated", "simulated_memory", "simulated_hosts")
"""In virtual time: a host for every rank, one for all of them, and two ranks on each."""

LEVELS = (*TRANSPORTS, "tls", "hosts", "simulated", "simulated_hosts")
"""And "tls": sockets with encryption, as between hosts; "hosts": two ranks on each of several hosts, as far as they
go."""

SECRET = Secret("a secret of these tests alone")

TIMEOUT = timedelta(seconds=20)


def pairwise(**dimensions: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrise a test with few combinations, in which every two values of different dimensions meet."""
    cases = list(itertools.product(*(range(len(values)) for values in dimensions.values())))
    pairs_of = {case: set(itertools.combinations(enumerate(case), 2)) for case in cases}
    missing, chosen = set().union(*pairs_of.values()), []
    while missing:
        chosen.append(max(cases, key=lambda case: len(pairs_of[case] & missing)))
        missing -= pairs_of[chosen[-1]]
    values = [tuple(each[number] for each, number in zip(dimensions.values(), case, strict=True)) for case in chosen]
    return pytest.mark.parametrize(tuple(dimensions), values, ids=str)


def run_threads(
    function: Callable[..., Any], *args: Any, size: int, transport: str, timeout: timedelta = TIMEOUT
) -> list[Any]:
    """`function(world, *args)` on `size` ranks; their results, or the exceptions they raised, by rank."""
    if transport == "tls":
        pytest.importorskip("cryptography")
    if transport in SIMULATED:
        return _run_simulated(function, *args, size=size, transport=transport, timeout=timeout)
    coordinator = LocalCoordinator()
    results: list[Any] = [None] * size
    per_host = {"tls": 1, "hosts": 2}.get(transport, size)
    hosts = [f"host{rank // per_host}" for rank in range(size)]
    peers = [Peer.this_process(rank, host, host) for rank, host in enumerate(hosts)]

    def work(rank: int) -> None:
        try:
            member = coordinator.member(peers[rank].process)
            member.secret = SECRET if transport == "tls" else None
            with _world(Membership(rank, peers, member, "world", timeout), transport) as world:
                results[rank] = function(world, *args)
        except SystemExit:
            return  # It was a server.
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}") for rank in range(size)]
    # With TLS, loopback is taken for a network.
    with patch("tutti.coordination.handshake.is_loopback", return_value=transport != "tls"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)
            assert not thread.is_alive(), f"{thread.name} hangs; so far: {results}"
    return results


def _run_simulated(
    function: Callable[..., Any], *args: Any, size: int, transport: str, timeout: timedelta
) -> list[Any]:
    def work() -> Any:
        try:
            with torch.enable_grad():
                return function(tutti.init(), *args)
        except Exception as error:
            return error

    per_host = {"simulated": 1, "simulated_memory": size, "simulated_hosts": 2}[transport]
    cluster = Cluster(link=Link("1gbit", "50us"), ranks_per_host=per_host)
    return simulate(work, workers=size, cluster=cluster, timeout=timeout).results


def run_ok(function: Callable[..., Any], *args: Any, size: int, transport: str) -> list[Any]:
    """Like `run_threads`, for functions that should not raise: the first rank that did fails the test."""
    results = run_threads(function, *args, size=size, transport=transport)
    failures = [(rank, result) for rank, result in enumerate(results) if isinstance(result, Exception)]
    for rank, failure in failures:
        print(f"rank {rank}:")
        traceback.print_exception(failure)
    assert not failures, f"rank {failures[0][0]} raised {failures[0][1]!r}"
    return results


class _world:
    def __init__(self, membership: Membership, transport: str) -> None:
        self._membership, self._transport = membership, transport

    def __enter__(self) -> World:
        membership = self._membership
        kind = {"hosts": "auto", "tls": "sockets"}.get(self._transport, self._transport)
        link = SingleRankTransport(membership.timeout) if membership.size == 1 else connect(membership, kind=kind)
        self.world = World(membership.rank, membership.size, membership.rank, "host", link, leave=membership.leave)
        return self.world

    def __exit__(self, *_: object) -> None:
        self.world.close()
