"""Clock offsets between ranks on different hosts."""

import pytest

from support import run_ok
from tutti.collectives import clock_offsets
from tutti.transports.base import Transport, TransportWrapper
from tutti.world import World


class Elsewhere(TransportWrapper):
    """A rank on a host of its own, whose clock is an hour ahead of the one before."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.rank, self.size, self.timeout = inner.rank, inner.size, inner.timeout
        self.hosts = tuple(f"host{rank}" for rank in range(inner.size))

    def now(self) -> float:
        return super().now() + 3600 * self.rank

    def channel(self, *_: object) -> Transport:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def _ahead(world: World, apart: bool) -> list[float]:
    return clock_offsets(Elsewhere(world.transport) if apart else world.transport)


def test_each_host_has_a_clock_of_its_own() -> None:
    everyone = run_ok(_ahead, True, size=3, transport="sockets")
    assert everyone[0] == everyone[1] == everyone[2] == pytest.approx([0.0, 3600.0, 7200.0], abs=0.5)
    assert run_ok(_ahead, False, size=2, transport="sockets") == [[0.0, 0.0]] * 2
