"""What Lightning, Accelerate and the Trainer of Transformers ask of a default group, without these packages."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tutti
from torch_groups import GROUPS, on_ranks


def _simulated(function: Any, workers: int = 3) -> list[Any]:
    cluster = tutti.Cluster(link=tutti.Link("1gbit", "50us"))
    return tutti.simulate(function, workers=workers, cluster=cluster).results


def _lightning_mean(value: Tensor) -> Tensor:
    """What Lightning does for `self.log(..., sync_dist=True)` and every backend but the one called "gloo"."""
    assert dist.get_backend() != "gloo"
    dist.barrier()
    dist.all_reduce(value, op=dist.ReduceOp.AVG)
    return value


def _log_as_lightning() -> tuple[float, float, int]:
    """The mean of a metric, weighted by batch sizes that are integers, as in validation."""
    dist.init_process_group("tutti")
    with torch.inference_mode():
        batch_sizes = torch.tensor(0) + torch.tensor(8)
        summed = torch.tensor(float(dist.get_rank())) * batch_sizes
        mean = _lightning_mean(summed.clone()) / _lightning_mean(batch_sizes.clone())
        count = _lightning_mean(torch.tensor([7 * dist.get_rank()]))
    seen = float(mean), float(_lightning_mean(torch.tensor(2.0 * dist.get_rank()))), int(count)
    dist.destroy_process_group()
    return seen


def test_lightning_averages_integers() -> None:
    assert _simulated(_log_as_lightning) == [(1.0, 2.0, 7)] * 3


@pytest.mark.parametrize("kind", GROUPS)
def test_inference_mode(kind: str) -> None:
    """Lightning validates in it on every backend but Gloo. Threads that run collectives are not in that mode."""

    def call(group: Any) -> list[Any]:
        summed, transposed = torch.ones(1001), torch.arange(6.0).reshape(2, 3).t()
        works = [group.allreduce([summed]), group.allreduce([transposed]), group.barrier()]
        gathered, received = [torch.zeros(2) for _ in range(2)], torch.zeros(3)
        works.append(group.allgather([gathered], [torch.full((2,), 1.0 + group.rank())]))
        works += [group.send([torch.full((3,), 5.0)], 1 - group.rank()), group.recv([received], 1 - group.rank())]
        for work in works:
            work.wait()
        return [summed.sum().item(), transposed.tolist(), [each.tolist() for each in gathered], received.tolist()]

    def work(group: Any) -> list[Any]:
        with torch.inference_mode():
            inside = call(group)
        return [inside, call(group)]

    wanted = [2002.0, [[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]], [[1.0, 1.0], [2.0, 2.0]], [5.0] * 3]
    assert on_ranks(GROUPS[kind], 2, work) == [[wanted, wanted]] * 2


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_a_mean_of_integers_is_cut_off_towards_zero(kind: str, dtype: torch.dtype) -> None:
    """As NCCL divides, and as Lightning does itself on Gloo: it copies the quotient into the integer."""
    values = torch.tensor([[1, 4, 9], [2, 6, 1], [2, 5, 4]], dtype=dtype)
    if dtype.is_signed:
        values[:, 2] *= -1

    def work(group: Any) -> list[int]:
        options = dist.AllreduceOptions()  # type: ignore[attr-defined]
        options.reduceOp = dist.ReduceOp.AVG
        mine = values[group.rank()].clone()
        group.allreduce([mine], options).wait()
        return mine.tolist()

    summed = values.sum(0)
    wanted = torch.zeros(3, dtype=dtype).copy_(summed / 3).tolist()
    assert wanted == [1, 5, -4 if dtype.is_signed else 4]
    assert on_ranks(GROUPS[kind], 3, work) == [wanted] * 3


def test_a_mean_of_large_integers_is_exact() -> None:
    def work(group: Any) -> int:
        options = dist.AllreduceOptions()  # type: ignore[attr-defined]
        options.reduceOp = dist.ReduceOp.AVG
        mine = torch.tensor([2**60 + 1])
        group.allreduce([mine], options).wait()
        return int(mine)

    assert on_ranks(GROUPS["memory"], 2, work) == [2**60 + 1] * 2


def _gather_as_accelerate() -> tuple[Any, ...]:
    """With a default group that the program made: Accelerate makes one of its own only if there is none."""
    dist.init_process_group("tutti")
    assert dist.is_initialized()
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered = [torch.empty(2) for _ in range(size)]
    dist.all_gather(gathered, torch.full((2,), float(rank)))
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    shared = [f"from {rank}"]
    dist.broadcast_object_list(shared, src=1)
    total = torch.tensor(float(rank))
    dist.all_reduce(total, dist.ReduceOp.SUM)
    dist.barrier()
    dist.destroy_process_group()
    return torch.cat(gathered).tolist(), objects, shared, float(total)


def test_accelerate_gathers_on_the_group_that_is_there() -> None:
    wanted = ([0.0, 0.0, 1.0, 1.0, 2.0, 2.0], [{"rank": 0}, {"rank": 1}, {"rank": 2}], ["from 1"], 3.0)
    assert _simulated(_gather_as_accelerate) == [wanted] * 3


def _devices() -> tuple[list[torch.device], list[torch.device]]:
    dist.init_process_group("tutti")
    default: Any = dist.group.WORLD
    before = default._device_types
    dist.destroy_process_group()
    return before, default._device_types


def test_a_group_has_a_device_from_when_torch_has_made_it() -> None:
    """Since torch 2.15, a group that has one earlier gets a flight recorder, which needs backends in C++."""
    assert _simulated(_devices, workers=2) == [([torch.device("cpu")], [])] * 2
