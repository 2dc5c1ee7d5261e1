"""`tutti bench allreduce`: the all-reduce in Tutti's shared memory beside Gloo and Open MPI."""

import statistics
from collections.abc import Callable
from typing import Any

import torch

from tutti.bench.under_mpi import communicator
from tutti.errors import ConfigError
from tutti.launch import init
from tutti.launch.supervisor_pipe import SupervisorPipe
from tutti.transports import AllReduces, SharesMemory
from tutti.world import World

SIZES = [2**exponent for exponent in range(10, 27, 2)]
"""Message sizes in bytes, from 1 KiB to 64 MiB."""

ROUND_BYTES = 64 * 2**20
"""Bytes that one candidate sums in a round: so many calls that a single one does not decide."""
MAX_PER_ROUND = 300
"""Largest number of calls in a round; small messages would have tens of thousands."""


def measure(rounds: int) -> list[dict[str, Any]]:
    """Time every size on all ranks. Returns one row per size, on every rank."""
    world, supervisor = init(), SupervisorPipe()
    rows = []
    for number, num_bytes in enumerate(SIZES):
        supervisor.progress(done=number, total=len(SIZES), size=num_bytes)
        rows.append(_measure_size(num_bytes, world, rounds))
    return rows


def _measure_size(num_bytes: int, world: World, rounds: int) -> dict[str, Any]:
    """Time all candidates at one size, interleaved; return the medians and Tutti's speed relative to its peers."""
    candidates = _candidates(num_bytes // 4, world)
    per_round = max(1, min(MAX_PER_ROUND, ROUND_BYTES // num_bytes))
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds + 1):
        for name, candidate in candidates.items():
            candidate()  # A barrier, and a warm cache.
            start = world.transport.now()
            for _ in range(per_round):
                candidate()
            if number:  # The first round only warms up.
                samples[name].append((world.transport.now() - start) / per_round)
    seconds = {name: statistics.median(values) for name, values in samples.items()}
    ratios = {
        f"times_{peer}": seconds[peer] / seconds["tutti"] if peer in seconds else None for peer in ("gloo", "mpi")
    }
    return {"num_bytes": num_bytes, "workers": world.size, "seconds": seconds, **ratios}


def _candidates(numel: int, world: World) -> dict[str, Callable[[], Any]]:
    """Return the same sum by every library that is here, by name."""
    transport = world.transport
    if not isinstance(transport, SharesMemory) or not isinstance(transport, AllReduces):
        raise ConfigError("bench allreduce needs ranks that share memory: all on one Linux host.")
    gloo = transport.inner
    assert isinstance(gloo, AllReduces)
    # Zeros: summed again and again in place, other values would overflow. "tutti" sums in memory that ranks share,
    # "tutti-copied" an ordinary tensor, which is copied there and back. The latter is what gloo and MPI get, too.
    shared, private = transport.empty(numel, torch.float32).zero_(), torch.zeros(numel)
    candidates: dict[str, Callable[[], Any]] = {
        "tutti": lambda: transport.all_reduce(shared).wait(),
        "tutti-copied": lambda: transport.all_reduce(private).wait(),
        "gloo": lambda: gloo.all_reduce(private).wait(),
    }
    if (mpi_world := communicator()) is not None:
        from mpi4py import MPI

        array = private.numpy()
        # In the same processes and on the same memory: only the all-reduce differs.
        candidates["mpi"] = lambda: mpi_world.Allreduce(MPI.IN_PLACE, array)
    return candidates
