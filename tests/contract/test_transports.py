"""One suite for every transport: what strategies and collectives rely on."""

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from support import LEVELS, TRANSPORTS, run_ok, run_threads
from tutti.errors import ConfigError, DeadlineExceeded, RankLost, ReplicaMismatch, WeightRefused
from tutti.transports import ANY, Averages, SharesMemory, Transport
from tutti.transports.base import Operation, Work
from tutti.transports.shared_memory.transport import SharedMemoryTransport
from tutti.world import World

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]

every_transport = pytest.mark.parametrize("transport", [*TRANSPORTS, "tls", "simulated_memory"])
every_messenger = pytest.mark.parametrize("transport", LEVELS)


@every_messenger
def test_messages_between_all_pairs(transport: str) -> None:
    def work(world: World) -> list[list[float]]:
        link, works, received = world.transport, [], []
        for other in range(world.size):
            if other != world.rank:
                received.append(torch.empty(3))
                works.append(link.irecv(received[-1], other, tag=world.rank))
                works.append(link.isend(torch.full((3,), float(10 * world.rank + other)), other, tag=other))
        for started in works:
            started.wait()
            started.wait()  # Waiting again is harmless.
            assert started.done()
        return [tensor.tolist() for tensor in received]

    results = run_ok(work, size=4, transport=transport)
    for rank, received in enumerate(results):
        assert received == [[10.0 * other + rank] * 3 for other in range(4) if other != rank]


@every_messenger
def test_tags_keep_messages_apart(transport: str) -> None:
    def work(world: World) -> list[float]:
        if world.rank == 0:
            sent = [world.transport.isend(torch.tensor([float(tag)]), 1, tag) for tag in (1, 2, 3)]
            [started.wait() for started in sent]
            return []
        values = []
        for tag in (3, 1, 2):
            tensor = torch.empty(1)
            world.transport.irecv(tensor, 0, tag).wait()
            values.append(float(tensor))
        return values

    assert run_ok(work, size=2, transport=transport)[1] == [3.0, 1.0, 2.0]


@every_messenger
def test_any_source(transport: str) -> None:
    def work(world: World) -> list[tuple[int, float]]:
        if world.rank != 0:
            world.transport.isend(torch.tensor([world.rank * 1.5]), 0).wait()
            return []
        found = []
        for _ in range(world.size - 1):
            tensor = torch.empty(1)
            received = world.transport.irecv(tensor, ANY)
            received.wait()
            found.append((received.source, float(tensor)))
        return sorted(found)

    assert run_ok(work, size=4, transport=transport)[0] == [(1, 1.5), (2, 3.0), (3, 4.5)]


@every_messenger
def test_layouts_and_dtypes_of_messages(transport: str) -> None:
    def work(world: World) -> None:
        for dtype in (*DTYPES, torch.bool, torch.complex64):
            tensor = torch.arange(12).reshape(3, 4).to(dtype)
            if world.rank == 0:
                world.transport.isend(tensor.t(), 1).wait()
                world.transport.isend(torch.empty(0, dtype=dtype), 1).wait()
            else:
                got = torch.zeros(3, 4, dtype=dtype).t()
                world.transport.irecv(got, 0).wait()
                assert torch.equal(got, tensor.t())
                world.transport.irecv(torch.empty(0, dtype=dtype), 0).wait()

    run_ok(work, size=2, transport=transport)


@every_transport
@settings(max_examples=12, deadline=None)
@given(
    size=st.integers(1, 5),
    shapes=st.lists(st.integers(0, 700), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    shared=st.booleans(),
)
@example(size=2, shapes=[0], dtype=torch.float32, shared=True)
@example(size=3, shapes=[0, 5, 0], dtype=torch.bfloat16, shared=True)
@example(size=2, shapes=[0], dtype=torch.int64, shared=False)
def test_all_reduce(transport: str, size: int, shapes: list[int], dtype: torch.dtype, shared: bool) -> None:
    def work(world: World) -> list[Tensor]:
        tensors = [_data(world.transport, numel, dtype, world.rank, shared) for numel in shapes]
        _wait_all([world.transport.all_reduce(tensor) for tensor in tensors])
        return tensors

    results = run_ok(work, size=size, transport=transport)
    for number, numel in enumerate(shapes):
        expected = sum(_values(numel, dtype, rank) for rank in range(size))
        for result in results:
            assert torch.equal(result[number], expected.to(dtype))


def _values(numel: int, dtype: torch.dtype, rank: int) -> Tensor:
    """Small whole numbers: their sums are exact in every dtype and every order."""
    generator = torch.Generator().manual_seed(1000 * numel + rank)
    return torch.randint(0, 16, (numel,), generator=generator).to(dtype)


def _data(link: Transport, numel: int, dtype: torch.dtype, rank: int, shared: bool) -> Tensor:
    values = _values(numel, dtype, rank)
    if not (shared and isinstance(link, SharesMemory)):
        return values
    memory = link.empty(numel, dtype)
    memory.copy_(values)
    return memory


def _wait_all(works: list[Work]) -> None:
    for work in works:
        work.wait()


@every_transport
def test_all_reduce_of_awkward_tensors(transport: str) -> None:
    def work(world: World) -> list[Tensor]:
        strided = torch.ones(4, 6)[:, ::2] * (world.rank + 1)
        complex_ = torch.full((3,), 1 + 2j) * (world.rank + 1)
        large = torch.full((3_000_000,), float(world.rank))  # More than the staging memory holds.
        _wait_all([world.transport.all_reduce(tensor) for tensor in (strided.contiguous(), complex_, large)])
        return [complex_, large[[0, 1_500_000, -1]]]

    for complex_, large in run_ok(work, size=3, transport=transport):
        assert complex_.tolist() == [6 + 12j] * 3
        assert large.tolist() == [3.0] * 3


@every_transport
def test_many_reductions_under_way(transport: str) -> None:
    def work(world: World) -> Tensor:
        tensors = [torch.tensor([float(number + world.rank)]) for number in range(100)]
        if isinstance(world.transport, SharesMemory):
            memory = world.transport.empty(100 * 16, torch.float32).view(100, 16)
            memory[:, 0] = torch.cat(tensors)
            tensors = [row[:1] for row in memory]
        _wait_all(list(reversed([world.transport.all_reduce(tensor) for tensor in tensors])))
        return torch.cat([tensor.clone() for tensor in tensors])

    for result in run_ok(work, size=3, transport=transport):
        assert torch.equal(result, 3.0 * torch.arange(100) + 3)


@every_transport
def test_channels_do_not_mix(transport: str) -> None:
    def work(world: World) -> list[float]:
        first, second = world.transport.channel("same name"), world.transport.channel("same name")
        tensors = [torch.tensor([1.0]), torch.tensor([10.0]), torch.tensor([100.0])]
        links = [first, second, world.transport]
        pairs = list(zip(links, tensors, strict=True))
        if world.rank == 1:
            pairs.reverse()  # Another order on each rank.
        _wait_all([link.isend(x, 1) if world.rank == 0 else link.irecv(x, 0) for link, x in pairs])
        first.close()
        _wait_all([second.all_reduce(tensors[1])])
        return [float(tensor) for tensor in tensors]

    assert run_ok(work, size=2, transport=transport)[1] == [1.0, 20.0, 100.0]


@every_transport
def test_a_rank_that_leaves_is_named(transport: str) -> None:
    def work(world: World) -> float:
        if world.rank == 2:
            return 0.0  # Closes its world.
        started = time.monotonic()
        with pytest.raises(RankLost, match=rf"rank {world.rank}: rank 2 is gone"):
            world.transport.all_reduce(torch.ones(3)).wait()
        return time.monotonic() - started

    assert max(run_ok(work, size=3, transport=transport)) < 5


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_does_not_answer_is_waited_for_no_longer_than_asked(transport: str) -> None:
    given_up = threading.Event()

    def work(world: World) -> float:
        if world.rank == 0:
            assert given_up.wait(40)
            return 1.0
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"rank 1: waited 1 s"):
            world.transport.all_reduce(torch.ones(3)).wait()
        given_up.set()
        return time.monotonic() - started

    results = run_threads(work, size=2, transport=transport, timeout=timedelta(seconds=1))
    assert all(0.5 < seconds < 10 for seconds in results), results


@every_transport
def test_a_closed_transport_says_so(transport: str) -> None:
    def work(world: World) -> None:
        world.transport.close()
        world.transport.close()
        for operation in (lambda link: link.all_reduce(torch.ones(1)), lambda link: link.isend(torch.ones(1), 0)):
            with pytest.raises(ConfigError):
                operation(world.transport)

    run_ok(work, size=2, transport=transport)


@every_messenger
@pytest.mark.parametrize("peer", [-2, 1, 7])
def test_a_peer_that_does_not_exist(transport: str, peer: int) -> None:
    def work(world: World) -> None:
        if world.rank == 1:
            with pytest.raises(ConfigError, match=f"no peer {peer}"):
                world.transport.isend(torch.ones(1), peer)

    run_ok(work, size=2, transport=transport)


def average(world: World, weights: list[float], values: list[float]) -> Any:
    assert isinstance(world.transport, Averages)
    tensor = torch.full((37,), values[world.rank], dtype=torch.float64)
    world.transport.average(tensor, weights[world.rank]).wait()
    assert torch.equal(tensor, tensor[:1].expand(37))
    return float(tensor[0])


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.floats(-10, 10)), min_size=2, max_size=4))
def test_average(pairs: list[tuple[int, float]]) -> None:
    weights, values = [float(weight) for weight, _ in pairs], [value for _, value in pairs]
    results = run_ok(average, weights, values, size=len(pairs), transport="shared_memory")
    assert len(set(results)) == 1
    if len(set(weights)) == 1:
        assert results[0] == sum(values) / len(values)
    else:
        expected = sum(weight * value for weight, value in pairs) / sum(weights)
        assert results[0] == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_average_leaves_out_weight_0() -> None:
    results = run_ok(average, [0.0, 1.0, 3.0], [float("nan"), 4.0, 8.0], size=3, transport="shared_memory")
    assert results == [7.0] * 3


def test_average_refuses_a_weight_of_nan_on_every_rank() -> None:
    results = run_threads(average, [1.0, float("nan"), 1.0], [1.0, 2.0, 3.0], size=3, transport="shared_memory")
    assert [type(result) for result in results] == [WeightRefused] * 3
    assert [result.ranks for result in results] == [[1]] * 3


def test_average_of_integers_is_refused() -> None:
    def work(world: World) -> None:
        with pytest.raises(ConfigError, match=r"mean of torch\.int64"):
            world.transport.average(torch.ones(3, dtype=torch.int64), 1.0)

    run_ok(work, size=2, transport="shared_memory")


def test_tensors_that_differ_are_named_on_every_rank() -> None:
    def work(world: World) -> None:
        world.transport.all_reduce(torch.ones(10 + world.rank)).wait()

    results = run_threads(work, size=3, transport="shared_memory")
    for rank, result in enumerate(results):
        assert isinstance(result, ReplicaMismatch)
        assert f"rank {rank}: " in str(result)
        assert "rank 0: 10 × torch.float32 at" in str(result)
        assert "rank 2: 12 × torch.float32 at" in str(result)


def test_tensors_in_different_places_are_not_mixed_up() -> None:
    def work(world: World) -> None:
        shared = world.transport.empty(8, torch.float32)
        world.transport.all_reduce(shared if world.rank == 0 else torch.ones(8)).wait()

    for result in run_threads(work, size=2, transport="shared_memory"):
        assert isinstance(result, ReplicaMismatch)
        assert "place in shared memory" in str(result)


@every_transport
def test_a_conversation_that_one_rank_closed(transport: str) -> None:
    """It lives on and closes nothing else: the others must not wait for it here."""

    def work(world: World) -> float:
        channel = world.transport.channel("one")
        started = time.monotonic()
        if world.rank == 0:
            channel.close()
        else:
            with pytest.raises(RankLost):
                channel.all_reduce(torch.ones(2)).wait()
        spent = time.monotonic() - started
        _wait_all([world.transport.all_reduce(torch.ones(1))])
        return spent

    assert max(run_ok(work, size=2, transport=transport)) < 5


@pytest.mark.parametrize("transport", ["sockets", "tls", "simulated"])
@pytest.mark.parametrize("how", ["start", "spawn"])
@pytest.mark.parametrize("fails", [False, True])
def test_an_operation_that_closes_its_own_transport_ends_by_itself(transport: str, how: str, fails: bool) -> None:
    def work(world: World) -> str:
        channel, peer = world.transport.channel("one"), 1 - world.rank

        def operation() -> Operation:
            yield from [channel.irecv(torch.empty(1), peer), channel.isend(torch.ones(1), peer)]
            channel.close()
            if fails:
                raise ValueError("its own error")

        started = getattr(channel, how)(operation())
        if fails:
            with pytest.raises(ValueError, match="its own error"):
                started.wait()
        else:
            started.wait()
        return "ended"

    assert run_ok(work, size=2, transport=transport) == ["ended"] * 2


def test_missing_ranks_have_the_numbers_of_the_channel() -> None:
    """World rank 2 is rank 0 of this channel: a caller that indexes by rank must not take it for another."""

    def work(world: World) -> set[int]:
        assert isinstance(world.transport, SharedMemoryTransport)
        if world.rank == 0:
            return {0}
        channel = world.transport.channel("pair", [2, 1])
        if world.rank == 2:
            channel.close()
            return {0}
        deadline = time.monotonic() + 10
        while not (missing := channel.missing()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return set(missing)

    assert run_ok(work, size=3, transport="shared_memory") == [{0}, {0}, {0}]


def test_shared_memory_is_freed_with_its_tensor() -> None:
    def work(world: World) -> list[int]:
        sizes = []
        for _ in range(3):
            tensor = world.transport.empty(1_000_000, torch.float32)
            tensor.fill_(1.0)
            world.transport.all_reduce(tensor).wait()
            sizes.append(len(world.transport._segments))
            del tensor
        sizes.append(len(world.transport._segments))
        return sizes

    for sizes in run_ok(work, size=2, transport="shared_memory"):
        assert sizes == [2, 2, 2, 1]  # One is the staging memory.
