"""Every collective over MPI, in worlds of 1 to 5 ranks: a program for `mpirun -n 5`.

Sizes and dtypes are drawn from a seed that all ranks share, so that they draw the same.
"""

import random
from datetime import timedelta

import pytest
import torch

import tutti
from tutti.collectives import ALGORITHMS, all_gather, broadcast, local_part, mean, reduce_scatter
from tutti.errors import ReplicaMismatch
from tutti.transports import Transport

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.complex64,
    torch.int16,
    torch.int64,
    torch.uint8,
    torch.bool,
]


def values(numel: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * numel + rank)
    return torch.randint(0, 14, (numel,), generator=generator).to(dtype)


def total(numel: int, dtype: torch.dtype, size: int) -> torch.Tensor:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.stack([values(numel, dtype, rank).to(wide) for rank in range(size)]).sum(0).to(dtype)


def sums(link: Transport, draw: random.Random) -> None:
    for name, algorithm in ALGORITHMS.items():
        for numel in (draw.choice((0, 1, 2, 3, 5)), draw.randrange(4, 3_000)):
            dtype = draw.choice(DTYPES)
            tensor = values(numel, dtype, link.rank)
            algorithm(tensor, link)
            assert torch.equal(tensor, total(numel, dtype, link.size)), (name, link.size, numel, dtype)
        weighed = values(40, torch.float64, link.rank)
        mean(weighed, link, algorithm, link.rank + 1.0)
        weights = range(1, link.size + 1)
        expected = sum(weight * values(40, torch.float64, weight - 1) for weight in weights) / sum(weights)
        torch.testing.assert_close(weighed, expected, rtol=1e-12, atol=1e-12)


def parts(link: Transport, draw: random.Random) -> None:
    numel, dtype = draw.randrange(0, 700), draw.choice(DTYPES)
    scattered, handed = values(numel, dtype, link.rank), values(9, dtype, link.rank)
    gathered = torch.zeros(numel, dtype=dtype)
    reduce_scatter(scattered, link)
    local_part(gathered, link).copy_(local_part(scattered, link))
    all_gather(gathered, link)
    broadcast(handed, link)
    assert torch.equal(gathered, total(numel, dtype, link.size))
    assert torch.equal(handed, values(9, dtype, 0))


def mismatches(link: Transport) -> None:
    for name, algorithm in ALGORITHMS.items():
        with pytest.raises(ReplicaMismatch, match=f"{name} needs tensors of one length and dtype.*rank 1 has 11 ×"):
            algorithm(torch.ones(11 if link.rank == 1 else 10), link)
    for length in (2, 6):
        if link.rank == 0:
            link.isend(torch.ones(length), 1).wait()
        elif link.rank == 1:
            with pytest.raises(ReplicaMismatch, match=r"rank 1: expected 4 × torch.float32 from rank 0, which sent"):
                link.irecv(torch.zeros(4), 0).wait()


def main() -> None:
    torch.set_num_threads(1)
    world = tutti.init(transport="mpi", timeout=timedelta(seconds=40))
    for size in range(1, world.size + 1):
        if world.rank < size:
            link = world.transport.channel("some", range(size))
            sums(link, random.Random(size))
            parts(link, random.Random(size))
    mismatches(world.transport)
    print(f"rank {world.rank} is content", flush=True)
