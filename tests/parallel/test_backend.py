"""Tutti's process groups beside Gloo's: the same calls, the same bits."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from torch_groups import GROUPS, gloo, on_ranks
from tutti.backend.operators import REDUCE_OPERATORS

Call = Callable[[Any, Callable[..., Tensor]], Any]

DTYPES = sorted({dtype for each in REDUCE_OPERATORS.values() for dtype in each.dtypes}, key=str)
LENGTHS = (0, 1, 2, 3, 7, 100, 1001, 70_001)


def _options(kind: type, **values: Any) -> Any:
    options = kind()
    for name, value in values.items():
        setattr(options, name, value)
    return options


def _random(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Other numbers on every rank, of sizes that make the order of sums matter."""
    generator = torch.Generator().manual_seed(1000 * rank + sum(shape))
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_complex:
        return torch.complex(_random(rank, *shape), _random(rank + 100, *shape)).to(dtype)
    if dtype.is_floating_point:
        return (torch.randn(shape, generator=generator) * 10 ** (rank % 3)).to(dtype)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def _reductions(group: Any) -> Iterator[Any]:
    """Every operator on every dtype that it takes, in every kind of reduction."""
    rank, size = group.rank(), group.size()
    for name, operator in REDUCE_OPERATORS.items():
        op = getattr(dist.ReduceOp, name)
        for dtype in operator.dtypes:
            if name == "AVG" and not (dtype.is_floating_point or dtype.is_complex):
                continue  # Gloo refuses them.
            tensor = _random(rank, 37, dtype=dtype)
            group.allreduce([tensor], _options(c10d.AllreduceOptions, reduceOp=op)).wait()
            yield name, dtype, tensor
    for length in LENGTHS:
        tensor = _random(rank, length)
        group.allreduce([tensor]).wait()
        yield "all-reduce", length, tensor
        several = [_random(rank, length), _random(rank, 2, length)]
        group.allreduce_coalesced(several).wait()
        yield "coalesced", length, several
        tensor = _random(rank, length)
        group.reduce([tensor], _options(c10d.ReduceOptions, rootRank=size - 1)).wait()
        yield "reduce", length, tensor if rank == size - 1 else None
        out = torch.empty(length)
        group._reduce_scatter_base(out, _random(rank, size * length), c10d.ReduceScatterOptions()).wait()
        yield "reduce-scatter", length, out
        out, whole = torch.empty(length), _random(rank, size, length)
        group.reduce_scatter([out], [list(whole)], c10d.ReduceScatterOptions()).wait()
        yield "reduce-scatter of parts", length, out
    tensor = _random(rank, 1_300_003, dtype=torch.float16)
    group.allreduce([tensor]).wait()
    yield "many segments", tensor


def _copies(group: Any) -> Iterator[Any]:
    rank, size = group.rank(), group.size()
    for length in LENGTHS:
        out = [torch.empty(length) for _ in range(size)]
        group.allgather([out], [_random(rank, length)]).wait()
        yield "all-gather", out
        whole = torch.empty(size * length)
        group._allgather_base(whole, _random(rank, length)).wait()
        yield "all-gather into one", whole
        for root in (0, size - 1):
            tensor = _random(rank, length)
            group.broadcast([tensor], _options(c10d.BroadcastOptions, rootRank=root)).wait()
            yield "broadcast", tensor
            out = [torch.empty(length) for _ in range(size)]
            options = _options(c10d.GatherOptions, rootRank=root)
            group.gather([out] if rank == root else [], [_random(rank, length)], options).wait()
            yield "gather", out if rank == root else None
            mine, options = torch.empty(length), _options(c10d.ScatterOptions, rootRank=root)
            group.scatter([mine], [list(_random(rank, size, length))] if rank == root else [], options).wait()
            yield "scatter", mine
        out = torch.empty(size * length)
        group.alltoall_base(out, _random(rank, size * length), [], []).wait()
        yield "all-to-all", out
    sent, received = [rank + other for other in range(size)], [other + rank for other in range(size)]
    out = torch.empty(sum(received), 3)
    group.alltoall_base(out, _random(rank, sum(sent), 3), received, sent).wait()
    yield "uneven all-to-all", out
    transposed = _random(rank, 4, 5).t()
    group.allreduce([transposed]).wait() if not isinstance(group, dist.ProcessGroupGloo) else transposed.copy_(
        _whole(group, rank)
    )
    yield "not contiguous", transposed
    group.barrier().wait()


def _whole(group: Any, rank: int) -> Tensor:
    tensor = _random(rank, 4, 5).t().contiguous()
    group.allreduce([tensor]).wait()
    return tensor


def _same(got: Any, wanted: Any) -> bool:
    if isinstance(wanted, Tensor):
        return got.dtype == wanted.dtype and torch.equal(
            got.view(torch.uint8) if got.dtype == torch.bool else got,
            wanted.view(torch.uint8) if got.dtype == torch.bool else wanted,
        )
    if isinstance(wanted, list | tuple):
        return len(got) == len(wanted) and all(map(_same, got, wanted))
    return got == wanted


@lru_cache(maxsize=1)  # The kinds of groups come one after the other.
def _gloos(size: int, calls: Callable[[Any], Iterator[Any]]) -> list[Any]:
    return on_ranks(gloo, size, lambda group: list(calls(group)))


@pytest.mark.parametrize(
    ("size", "kind"),
    [(1, "memory"), *((size, kind) for size in (2, 3, 4, 5) for kind in GROUPS)],  # One rank is on one host.
)
@pytest.mark.parametrize("calls", [_reductions, _copies])
def test_same_bits_as_gloo(kind: str, size: int, calls: Callable[[Any], Iterator[Any]]) -> None:
    wanted = _gloos(size, calls)
    got = on_ranks(GROUPS[kind], size, lambda group: list(calls(group)))
    for rank in range(size):
        assert isinstance(wanted[rank], list), wanted[rank]
        assert isinstance(got[rank], list), got[rank]
        for mine, gloos in zip(got[rank], wanted[rank], strict=True):
            assert _same(mine, gloos), f"rank {rank}: {gloos[:2]}"
