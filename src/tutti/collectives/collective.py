"""An all-reduce algorithm as one value: how it goes and what it costs; and calls of it that are checked."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.cluster import Link
from tutti.collectives.doubling import recursive_doubling
from tutti.collectives.steps import run
from tutti.errors import ReplicaMismatch
from tutti.transports.base import Operation, Transport
from tutti.transports.sockets.frames import DTYPES


@dataclass(frozen=True)
class Collective:
    """One way to combine tensors of all ranks.

    Called, it compares the ranks' tensors, runs to the end and has worked in place. `steps` neither compares nor waits:
    it is for callers who know that tensors agree, as buckets of a distributed model do, and have something to do
    meanwhile.
    """

    name: str
    steps: Callable[[Tensor, Transport], Operation]
    cost: Callable[[int, float, Link], float]
    """Seconds for a number of ranks, of bytes and a link."""

    def __call__(self, tensor: Tensor, transport: Transport) -> None:
        compare(tensor, transport, self.name)
        run(self.steps(tensor, transport))


def compare(tensor: Tensor, transport: Transport, what: str) -> None:
    """Raise on every rank if their tensors differ in length or dtype, or if they mean to do different things."""
    mine = [tensor.numel(), DTYPES.index(tensor.dtype), zlib.crc32(what.encode())]
    rows = torch.zeros(transport.size, len(mine), dtype=torch.int64, device="cpu")
    rows[transport.rank] = torch.tensor(mine, device="cpu")
    run(recursive_doubling(rows.view(-1), transport))
    if (rows == rows[0]).all():
        return
    has = [f"rank {rank} has {numel} × {DTYPES[code]}" for rank, (numel, code, _) in enumerate(rows.tolist())]
    if (rows[:, 2] != rows[0, 2]).any():
        has.append(f"and not all of them called {what}")
    raise ReplicaMismatch(f"rank {transport.rank}: {what} needs tensors of one length and dtype: {'; '.join(has)}.")
