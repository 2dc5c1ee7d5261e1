"""Sums by Gloo, whose connecting and summing nobody can interrupt from outside."""

import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch

from support import run_threads
from tutti.coordination import LocalCoordinator
from tutti.errors import RankLost
from tutti.transports import Membership, Peer, SocketTransport
from tutti.transports.gpu.process_groups import TorchGroupWork
from tutti.world import World

_IN_TIME_S = 10
"""Far below the transport's deadline."""


@pytest.mark.parametrize("first", ["all have come", "one has given up"])
def test_ranks_connect_all_or_none(first: str) -> None:
    """Rank 0 finds that rank 1 is lost, when rank 1 has just come after all; either may be the first to decide."""

    def meet(world: World) -> float:
        transport = world.transport
        assert isinstance(transport, SocketTransport)
        membership = transport.membership
        wait, come = membership.await_values, f"{transport.name}/gloo/0"

        def await_values(keys: list[str], *rest: Any, **options: Any) -> list[str]:
            if come not in keys:
                return wait(keys, *rest, **options)
            gives_up = world.rank == 0
            if gives_up == (first == "all have come"):
                assert wait([f"{transport.name}/gloo/verdict"], "a decision")
            if gives_up:
                raise RankLost("rank 0: rank 1 is gone")
            return []

        membership.await_values = await_values  # type: ignore[method-assign]
        tensor = torch.ones(4)
        transport.all_reduce(tensor).wait()
        return tensor[0].item()

    started = time.monotonic()
    results = run_threads(meet, size=2, transport="sockets")
    assert time.monotonic() - started < _IN_TIME_S
    if first == "all have come":
        assert results == [2.0, 2.0]
    else:
        assert all(isinstance(result, RankLost) for result in results)


def test_a_sum_that_failed_holds_no_sockets() -> None:
    """Whoever keeps the error would otherwise keep the group's sockets open, and ranks at their other ends waiting."""

    class Failing:
        @staticmethod
        def is_completed() -> bool:
            return True

        @staticmethod  # As in torch's, nothing of Python's is kept of the call itself.
        def wait(timeout: timedelta) -> None:
            raise RuntimeError("Connection closed by peer")

    peer = Peer.this_process(0, "here", "here")
    membership = Membership(0, [peer], LocalCoordinator().member(peer.process), "alone", timedelta(seconds=1))
    work = Failing()
    held, summed = weakref.ref(work), TorchGroupWork(work, membership)  # type: ignore[arg-type]
    del work
    with pytest.raises(RankLost) as raised:
        summed.wait()
    assert raised.value.__cause__ is not None
    assert held() is None
