"""`Collective`: an algorithm with its name and its cost formula, and checked calls of it."""

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
    """An algorithm that combines tensors of all ranks, in place.

    Calling it compares the ranks' tensors first, and returns when the result is there. `steps` neither compares nor
    waits. It is for callers who know that the tensors agree, as buckets of a distributed model do, and who have
    something else to do meanwhile.
    """

    name: str
    """The name in `ALGORITHMS` and at the command line."""
    steps: Callable[[Tensor, Transport], Operation]
    """Makes the operation: a generator that yields each piece of work it waits for."""
    cost: Callable[[int, float, Link], float]
    """Predicts the seconds it takes from the number of ranks, the number of bytes and the link between ranks."""

    def __call__(self, tensor: Tensor, transport: Transport) -> None:
        compare(tensor, transport, self.name)
        run(self.steps(tensor, transport))


def compare(tensor: Tensor, transport: Transport, what: str) -> None:
    """Raise `ReplicaMismatch` on every rank if their tensors differ in length or dtype, or their calls in kind.

    Args:
        what: name of the call. Ranks exchange a checksum of it.
    """
    # Three numbers on every rank, whatever its tensor: this exchange itself cannot fail for what it looks for.
    local = [tensor.numel(), DTYPES.index(tensor.dtype), zlib.crc32(what.encode())]
    # Each rank fills its own row of zeros, so that a sum gathers all rows.
    rows = torch.zeros(transport.size, len(local), dtype=torch.int64, device="cpu")
    rows[transport.rank] = torch.tensor(local, device="cpu")
    run(recursive_doubling(rows.view(-1), transport))
    if (rows == rows[0]).all():
        return
    has = [
        f"rank {rank} has {numel} × {DTYPES[code]}"
        for rank, (numel, code, _) in zip(transport.world_ranks, rows.tolist(), strict=True)
    ]
    if (rows[:, 2] != rows[0, 2]).any():
        has.append(f"and not all of them called {what}")
    raise ReplicaMismatch(
        f"rank {transport.world_rank}: {what} needs tensors of one length and dtype: {'; '.join(has)}."
    )
