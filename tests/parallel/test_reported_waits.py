"""What ranks report of their waits while messages move."""

import time

import torch

import tutti
from support import run_ok
from tutti.transports.base import Operation

SECONDS = 2.0


def waits_while_data_moves(world: tutti.World) -> float:
    """How long a rank reports to have waited for its peer, which sends other messages all the time."""
    transport = world.transport
    if world.rank == 0:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            transport.isend(torch.ones(1), 1, tag=7).wait()
            time.sleep(0.02)
        transport.isend(torch.ones(1), 1, tag=9).wait()
        return 0.0
    reported = 0.0

    def operation() -> Operation:
        nonlocal reported
        yield transport.irecv(torch.empty(1), 0, tag=9)
        [wait] = transport.activity.status()["waits"]  # Of the caller, below.
        reported = wait["s"]

    transport.spawn(operation()).wait()
    return reported


def test_data_that_moves_restarts_the_wait_for_an_operation() -> None:
    reported = run_ok(waits_while_data_moves, size=2, transport="sockets")[1]
    assert 0.0 < reported < SECONDS / 2
