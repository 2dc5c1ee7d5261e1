"""Plain programs of torch.distributed in virtual time: whose groups are whose, and how long what takes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.flop_counter import FlopCounterMode

import tutti
from tutti.cluster import Compute
from tutti.errors import RankLost, WorkerFailed

FLOPS = 1e9
LINK = tutti.Link("1gbit", "50us")


def _cluster(**more: Any) -> tutti.Cluster:
    return tutti.Cluster(link=LINK, compute=Compute(flops=FLOPS, step_s=0.5), **more)


def _run(function: Any, *args: Any, workers: int = 2, **more: Any) -> tutti.Simulation:
    return tutti.simulate(function, *args, workers=workers, cluster=_cluster(**more))


def _now() -> float:
    return tutti.world().transport.now()


def test_operators_take_time_and_so_do_steps() -> None:
    def work() -> tuple[float, float, float]:
        dist.init_process_group("tutti")
        weight = nn.Parameter(torch.ones(20, 30))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        start_s = _now()
        result = (torch.ones(10, 20) @ weight).relu().sum()
        forward_s = _now()
        result.backward()
        backward_s = _now()
        optimizer.step()
        return forward_s - start_s, backward_s - forward_s, _now() - backward_s

    product_s = 2 * 10 * 20 * 30 / FLOPS
    for times in _run(work).results:
        assert times == pytest.approx((product_s, product_s, 0.5))  # The input has no gradient.


def test_before_there_is_a_group_nothing_is_counted() -> None:
    def work() -> float:
        torch.ones(10, 20) @ torch.ones(20, 30)
        return _now()

    assert _run(work).results == [0.0, 0.0]


def test_each_rank_has_its_own_groups_and_the_caller_keeps_none() -> None:
    def work() -> tuple[Any, ...]:
        dist.init_process_group("tutti", init_method="tcp://nowhere:1", rank=0, world_size=1)  # It knows better.
        rank = dist.get_rank()
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        pair = pairs[rank // 2]
        tensor = torch.full((3,), float(rank))
        dist.all_reduce(tensor, group=pair)
        objects: list[Any] = [None] * 4
        dist.all_gather_object(objects, f"rank {rank}")
        found = dist.get_world_size(), dist.get_backend(), dist.get_rank(pair), tensor.tolist(), objects
        dist.destroy_process_group()
        return (*found, dist.is_initialized())

    objects = [f"rank {rank}" for rank in range(4)]
    sums = [1.0, 1.0, 5.0, 5.0]
    wanted = [(4, "tutti", rank % 2, [sums[rank]] * 3, objects, False) for rank in range(4)]
    assert _run(work, workers=4).results == wanted
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        dist.get_rank()


def test_an_operation_goes_on_while_its_rank_computes() -> None:
    def work(wait_first: bool) -> float:
        dist.init_process_group("tutti")
        tensor = torch.ones(10_000_000)
        start_s = _now()
        summing = dist.all_reduce(tensor, async_op=True)
        assert summing is not None
        if wait_first:
            summing.wait()
        for _ in range(10):
            torch.ones(100, 1000) @ torch.ones(1000, 100)
        summing.wait()
        assert float(tensor[-1]) == 2.0
        return _now() - start_s

    computing_s, summing_s = 10 * 2e7 / FLOPS, 8 * 4e7 / 1e9
    assert _run(work, True).results[0] == pytest.approx(computing_s + summing_s, rel=0.05)
    assert _run(work, False).results[0] == pytest.approx(max(computing_s, summing_s), rel=0.05)


def test_the_buckets_of_ddp_travel_during_backward() -> None:
    def work(bucket_cap_mb: float) -> float:
        dist.init_process_group("tutti")
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(8)))
        wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)
        x = torch.ones(20, 300)
        for _ in range(2):  # After the first, buckets are in the order of gradients.
            start_s = _now()
            wrapped(x).sum().backward()
        return _now() - start_s

    one, several = (_run(work, size).results[0] for size in (100.0, 0.4))
    computing_s = 3 * 8 * 2 * 20 * 300 * 300 / FLOPS
    assert one == pytest.approx(computing_s + 8 * 4 * 8 * 300 * 301 / 1e9, rel=0.05)
    assert several < 0.85 * one


def test_futures_and_questions_come_to_an_end_outside_backward() -> None:
    def work() -> tuple[float, float]:
        dist.init_process_group("tutti")
        first, second = torch.ones(1), torch.ones(1)
        summing: Any = dist.all_reduce(first, async_op=True)
        summing.get_future().wait()
        asked: Any = dist.all_reduce(second, async_op=True)
        while not asked.is_completed():
            pass
        return float(first), float(second)

    assert _run(work).results == [(2.0, 2.0)] * 2


def test_several_at_once() -> None:
    def work() -> list[Any]:
        dist.init_process_group("tutti")
        rank, group = dist.get_rank(), dist.group.WORLD
        sums = [torch.full((3,), float(rank)), torch.full((2,), 1.0)]
        with dist._coalescing_manager(group, async_ops=True) as manager:
            for tensor in sums:
                dist.all_reduce(tensor)
        manager.wait()
        given, halves = torch.full((4,), float(rank)), torch.full((2,), float(rank))
        with dist._coalescing_manager(group, torch.device("cpu"), async_ops=True) as manager:
            dist.broadcast(given, src=1)
        manager.wait()
        came = torch.empty(2)
        ops = [dist.P2POp(dist.isend, halves, 1 - rank), dist.P2POp(dist.irecv, came, 1 - rank)]
        for each in dist.batch_isend_irecv(ops):
            each.wait()
        return [tensor.tolist() for tensor in (*sums, given, came)]

    first, second = _run(work).results
    assert first == [[1.0] * 3, [2.0] * 2, [1.0] * 4, [1.0, 1.0]]
    assert second == [*first[:3], [0.0, 0.0]]


def _sum_for_ever() -> None:
    while True:
        dist.all_reduce(torch.ones(1000))


def test_a_rank_that_dies_is_a_runtime_error_of_the_others() -> None:
    def work() -> str:
        dist.init_process_group("tutti")
        with pytest.raises(RuntimeError) as raised:
            _sum_for_ever()
        assert isinstance(raised.value, RankLost)
        return str(raised.value)

    found = _run(work, workers=3, failures={2: 0.01})
    assert list(found.lost) == [2]
    assert all("rank 2 is gone: it died at 10ms" in said for said in found.results[:2])


def test_a_mistake_is_of_the_rank_that_made_it() -> None:
    def work() -> None:
        dist.init_process_group("tutti")
        if dist.get_rank() == 1:
            raise KeyError("lost key")
        dist.barrier()

    with pytest.raises(WorkerFailed, match=r"rank 1 .*lost key"):
        _run(work)


def test_what_distribute_lets_pass_is_not_counted_twice() -> None:
    def work(grouped: bool) -> float:
        tutti.init()
        if grouped:
            dist.init_process_group("tutti")
        model = nn.Linear(100, 100)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tutti.distribute(model, optimizer):
            start_s = _now()
            model(torch.ones(50, 100)).mean().backward()
            optimizer.step()
            return _now() - start_s

    assert _run(work, True).results == pytest.approx(_run(work, False).results)


def test_who_counts_counts_for_as_long_as_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group counts operators; a job's model says how long it takes, and the job that ends leaves it to the group."""
    # Ranks that are threads, of other tests, may have left it set: torch has one for all threads.
    monkeypatch.setattr(_python_dispatch, "_is_in_torch_dispatch_mode", False)

    def product_s() -> float:
        start_s = _now()
        torch.ones(100, 1000) @ torch.ones(1000, 100)
        return _now() - start_s

    def work() -> list[float]:
        tutti.init()
        found = [product_s()]
        dist.init_process_group("tutti")
        found.append(product_s())
        for mesh in (None, tutti.Mesh(tensor=2), None):
            model = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 100))
            with tutti.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh):
                found.append(product_s())
            found.append(product_s())
        dist.destroy_process_group()
        found.append(product_s())
        model = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 100))
        with tutti.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=tutti.Mesh(tensor=2)):
            found.append(product_s())
        return [*found, product_s()]

    counted = 2e7 / FLOPS
    wanted = [0, counted, 0, counted, counted, counted, 0, counted, 0, counted, 0]
    assert _run(work).results == [pytest.approx(wanted)] * 2
    assert not is_in_torch_dispatch_mode()  # Or nothing would be compiled any more.


def test_a_group_counts_on_where_another_mode_came_and_went() -> None:
    def work() -> list[float]:
        times = []
        with FlopCounterMode(display=False) as others:
            dist.init_process_group("tutti")
            with FlopCounterMode(display=False) as inner:
                torch.ones(10, 100) @ torch.ones(100, 10)
                dist.destroy_process_group()
                times.append(_now())
                torch.ones(10, 100) @ torch.ones(100, 10)
                times.append(_now())
        return [*times, others.get_total_flops(), inner.get_total_flops()]

    assert _run(work).results == [pytest.approx([2e4 / FLOPS, 2e4 / FLOPS, 4e4, 4e4])] * 2


def test_what_is_called_at_the_end_may_wait_for_more() -> None:
    def work() -> float:
        dist.init_process_group("tutti")
        first, second = torch.ones(1), torch.ones(1)
        summing: Any = dist.all_reduce(first, async_op=True)

        def more(_: Any) -> float:
            dist.all_reduce(second)
            return float(first + second)

        return float(summing.get_future().then(more).wait())

    assert _run(work).results == [4.0, 4.0]
