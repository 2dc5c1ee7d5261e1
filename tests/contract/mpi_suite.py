"""What strategies and collectives rely on, over MPI: a program for mpirun, since MPI's ranks are processes.

`main` with the argument TRANSPORT makes every check, with `TRANSPORT reductions` those of all-reduce alone, and with
`TRANSPORT loss` sees one rank leave, after which MPI can only be aborted. It must not start MPI itself: `tutti.init`
tells it which algorithm to use.
"""

import sys
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from torch import Tensor

import tutti
from tutti.codecs import ErrorFeedback, LowRank, OneBit, TopK
from tutti.collectives import recursive_doubling, run
from tutti.collectives.compressed import STAGE_BOUNDARY, ReductionContext, compressed_sum_for
from tutti.errors import ConfigError, DeadlineExceeded, RankLost
from tutti.transports import ANY, AllReduces, Membership, Transport
from tutti.transports.base import Operation, Work

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


def wait_all(works: list[Work]) -> None:
    for work in works:
        work.wait()


def messages_between_all_pairs(link: Transport) -> None:
    works, received = [], {}
    for other in range(link.size):
        if other != link.rank:
            received[other] = torch.empty(3)
            works.append(link.irecv(received[other], other, tag=link.rank))
            works.append(link.isend(torch.full((3,), float(10 * link.rank + other)), other, tag=other))
    for work in works:
        work.wait()
        work.wait()  # Waiting again is harmless.
        assert work.done()
    for other, tensor in received.items():
        assert tensor.tolist() == [10.0 * other + link.rank] * 3
    assert link.bytes_sent == 12 * (link.size - 1)


def large_messages(link: Transport) -> None:
    """More than MPI sends ahead of its receiver, both ways at once."""
    right, left = (link.rank + 1) % link.size, (link.rank - 1) % link.size
    got = torch.empty(1_000_000)
    wait_all([link.isend(torch.full((1_000_000,), float(link.rank)), right), link.irecv(got, left)])
    assert torch.equal(got, torch.full((1_000_000,), float(left)))


def tags_keep_messages_apart(link: Transport) -> None:
    if link.rank == 0:
        wait_all([link.isend(torch.tensor([float(tag)]), 1, tag) for tag in (1, 2, 3)])
    elif link.rank == 1:
        for tag in (3, 1, 2):
            tensor = torch.empty(1)
            link.irecv(tensor, 0, tag).wait()
            assert float(tensor) == tag


def any_source(link: Transport) -> None:
    if link.rank != 0:
        link.isend(torch.tensor([link.rank * 1.5]), 0).wait()
        return
    found = []
    for _ in range(link.size - 1):
        tensor = torch.empty(1)
        received = link.irecv(tensor, ANY)
        found.append((received.source, float(tensor)))
    assert sorted(found) == [(rank, rank * 1.5) for rank in range(1, link.size)]


def a_receive_is_not_done_before_its_message(link: Transport) -> None:
    if link.rank == 0:
        tensor = torch.empty(1)
        received = link.irecv(tensor, 1)
        assert not received.done()
        link.isend(torch.ones(1), 1).wait()
        while not received.done():
            pass
        received.wait()
        assert float(tensor) == 7.0
    elif link.rank == 1:
        link.irecv(torch.empty(1), 0).wait()
        link.isend(torch.tensor([7.0]), 0).wait()


def layouts_and_dtypes_of_messages(link: Transport) -> None:
    for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex64):
        tensor = torch.arange(12).reshape(3, 4).to(dtype)
        if link.rank == 0:
            link.isend(tensor.t(), 1).wait()
            link.isend(torch.empty(0, dtype=dtype), 1).wait()
        elif link.rank == 1:
            got = torch.zeros(3, 4, dtype=dtype).t()
            link.irecv(got, 0).wait()
            assert torch.equal(got, tensor.t())
            link.irecv(torch.empty(0, dtype=dtype), 0).wait()


def values(numel: int, dtype: torch.dtype, rank: int) -> Tensor:
    """Small whole numbers: their sums are exact in every dtype and every order."""
    generator = torch.Generator().manual_seed(1000 * numel + rank)
    return torch.randint(0, 16, (numel,), generator=generator).to(dtype)


def sums(link: AllReduces) -> None:
    assert isinstance(link, Transport)
    for dtype in (*FLOATS, *INTEGERS):
        sizes = (0, 1, 2, 3, 5, 700, 20_001)
        tensors = [values(numel, dtype, link.rank) for numel in sizes]
        wait_all([link.all_reduce(tensor) for tensor in tensors])
        for numel, tensor in zip(sizes, tensors, strict=True):
            expected = sum(values(numel, dtype, rank) for rank in range(link.size))
            assert torch.equal(tensor, expected), (dtype, numel)


def sums_of_awkward_tensors(link: AllReduces) -> None:
    assert isinstance(link, Transport)
    factor = link.rank + 1
    total = link.size * (link.size + 1) // 2
    strided = torch.ones(4, 6)
    complex_ = torch.full((3,), 1 + 2j) * factor
    large = torch.full((3_000_000,), float(factor))
    wrapping = torch.full((5,), 100, dtype=torch.uint8)
    flags = torch.tensor([link.rank == 1, False, True])
    strided[:, ::2] *= factor
    leaf = torch.full((2,), float(factor), requires_grad=True)
    wait_all([link.all_reduce(tensor) for tensor in (strided[:, ::2], complex_, large, wrapping, flags, leaf)])
    assert torch.equal(strided, torch.tensor([float(total), 1.0] * 3).expand(4, 6))
    assert complex_.tolist() == [total * (1 + 2j)] * 3
    assert torch.equal(large, torch.full((3_000_000,), float(total)))
    assert wrapping.tolist() == [100 * link.size % 256] * 5
    assert flags.tolist() == [True, False, True]
    assert leaf.tolist() == [float(total)] * 2


def sums_are_the_same_bits_everywhere(link: AllReduces) -> None:
    assert isinstance(link, Transport)
    for numel in (3, 1000, 100_000):
        for dtype in FLOATS:
            tensor = torch.randn(numel, generator=torch.Generator().manual_seed(link.rank)).to(dtype)
            link.all_reduce(tensor).wait()
            mine = tensor.view(torch.uint8)
            if link.rank == 0:
                wait_all([link.isend(mine, other) for other in range(1, link.size)])
            else:
                theirs = torch.empty_like(mine)
                link.irecv(theirs, 0).wait()
                assert torch.equal(mine, theirs)


def many_sums_under_way(link: AllReduces) -> None:
    assert isinstance(link, Transport)
    tensors = [torch.tensor([float(number + link.rank)]) for number in range(100)]
    wait_all(list(reversed([link.all_reduce(tensor) for tensor in tensors])))
    offset = sum(range(link.size))
    assert torch.equal(torch.cat(tensors), float(link.size) * torch.arange(100) + offset)


def channels_do_not_mix(link: Transport) -> None:
    first, second = link.channel("same name"), link.channel("same name")
    tensors = [torch.tensor([1.0]), torch.tensor([10.0]), torch.tensor([100.0])]
    pairs = list(zip([first, second, link], tensors, strict=True))
    if link.rank == 1:
        pairs.reverse()  # Another order on each rank.
    if link.rank < 2:
        wait_all([each.isend(x, 1) if link.rank == 0 else each.irecv(x, 0) for each, x in pairs])
    first.close()
    assert isinstance(second, AllReduces)
    second.all_reduce(tensors[1]).wait()
    assert [float(tensor) for tensor in tensors] == [1.0, 10.0 * link.size, 100.0]


def channels_between_some_ranks(link: Transport) -> None:
    odd = link.rank % 2
    ranks = [rank for rank in reversed(range(link.size)) if rank % 2 == odd]
    some = link.channel("some", ranks)
    again = link.channel("some", ranks)
    assert (some.rank, some.size) == (ranks.index(link.rank), len(ranks))
    assert some.hosts == tuple(link.hosts[rank] for rank in ranks)
    for each in (again, some):
        assert isinstance(each, AllReduces)
        tensor = torch.tensor([float(link.rank)])
        each.all_reduce(tensor).wait()
        assert float(tensor) == sum(ranks)
    tensor = torch.empty(1)
    if some.rank == 0:
        some.isend(torch.tensor([3.5]), 1).wait()
    else:
        some.irecv(tensor, 0).wait()
        assert float(tensor) == 3.5
    if link.rank == 0:
        alone = link.channel("alone", [0])
        assert isinstance(alone, AllReduces)
        alone.all_reduce(tensor).wait()


def steps_are_taken_beside(link: Transport) -> None:
    totals = [torch.zeros(1) for _ in range(3)]

    def around(number: int) -> Operation:
        right, left = (link.rank + 1) % link.size, (link.rank - 1) % link.size
        value = torch.tensor([float(link.rank + number)])
        for _ in range(link.size):
            totals[number] += value
            got = torch.empty(1)
            sent = link.isend(value, right, number)
            yield link.irecv(got, left, number)
            yield sent
            value = got

    works = [link.start(around(number)) for number in range(3)]
    wait_all(list(reversed(works)))
    assert [float(total) for total in totals] == [sum(range(link.size)) + link.size * number for number in range(3)]


def failing_steps_say_so(link: Transport) -> None:
    def broken() -> Operation:
        yield from ()
        raise ZeroDivisionError("in a step")

    with pytest.raises(ZeroDivisionError):
        link.start(broken()).wait()


def a_closed_transport_says_so(link: Transport) -> None:
    """Whatever is under way ends with it."""
    made = link.channel("to be closed")
    waiting = made.irecv(torch.empty(1), (link.rank + 1) % link.size)
    made.close()
    made.close()
    assert isinstance(made, AllReduces)
    with pytest.raises(RankLost, match="closed"):
        waiting.wait()
    for operation in (lambda: made.all_reduce(torch.ones(1)), lambda: made.isend(torch.ones(1), (link.rank + 1) % 4)):
        with pytest.raises(ConfigError, match="closed"):
            operation()


def a_conversation_that_one_rank_closed(link: Transport) -> None:
    made = link.channel("one")
    if link.rank == 0:
        made.isend(torch.tensor([5.0]), 1, tag=1).wait()
        made.close()
    elif link.rank == 1:
        started = time.monotonic()
        with pytest.raises(RankLost, match="rank 1: rank 0 is gone: it has closed this channel"):
            made.irecv(torch.empty(1), 0).wait()
        assert time.monotonic() - started < 5
        tensor = torch.empty(1)
        made.irecv(tensor, 0, tag=1).wait()  # What it sent before still arrives.
        assert float(tensor) == 5.0
    assert isinstance(link, AllReduces)
    link.all_reduce(torch.ones(1)).wait()


def peers_that_do_not_exist(link: Transport) -> None:
    for peer in (-2, link.rank, 7):
        with pytest.raises(ConfigError, match=f"no peer {peer}"):
            link.isend(torch.ones(1), peer)


def a_rank_that_does_not_answer_is_waited_for_no_longer_than_asked(link: Transport) -> None:
    from mpi4py import MPI

    from tutti.transports.mpi.transport import MpiTransport

    assert isinstance(link, MpiTransport)
    membership = link.membership
    hasty = Membership(membership.rank, membership.peers, membership.member, membership.scope, timedelta(seconds=1))
    made = MpiTransport(hasty, MPI.COMM_WORLD.Dup(), name="hasty")
    keys = [f"gave up {rank}" for rank in range(1, link.size)]
    made.all_reduce(torch.ones(1)).wait()
    if link.rank == 0:
        membership.await_values(keys, "the others to give up")
        made.all_reduce(torch.ones(3)).wait()
    else:
        started = time.monotonic()
        reduction = made.all_reduce(torch.ones(3))
        with pytest.raises(DeadlineExceeded, match=rf"rank {link.rank}: waited 1 s"):
            reduction.wait()
        with pytest.raises(DeadlineExceeded):
            made.irecv(torch.empty(1), 0).wait()
        assert 1.5 < time.monotonic() - started < 10
        membership.set(f"gave up {link.rank}", "1")
    made.close()
    assert not made.broken


def packets_are_summed(link: Transport) -> None:
    """Sums of every kind, several under way at once, as a strategy with a codec has them."""
    for codec in (OneBit(), TopK(0.1), LowRank(1)):
        layout = ((0, (20, 50)),)
        context = ReductionContext(link.rank, link.size, divisor=link.size)
        compressed = [compressed_sum_for(codec)(ErrorFeedback(codec), layout, 1000, context) for _ in range(3)]
        tensors = [values(1000, torch.float32, link.rank) + number for number in range(3)]
        exacts = [torch.full((5,), float(link.rank)) for _ in range(3)]
        opened = [each.steps(*pair, link) for each, *pair in zip(compressed, tensors, exacts, strict=True)]
        parts = [[up_to_pause(steps) for steps in opened] for _ in range(compressed_sum_for(codec).num_boundaries)]
        for part in [steps for row in [*parts, opened] for steps in row]:
            link.start(part).wait()
        mean = (link.size - 1) / 2
        assert all((exact == mean).all() for exact in exacts)
        sums = torch.cat(tensors).double()
        alike = torch.zeros(link.size, dtype=torch.float64)
        alike[link.rank] = sums.sum()
        run(recursive_doubling.steps(alike, link))
        assert (alike == alike[0]).all()


def up_to_pause(steps: Operation) -> Operation:
    for work in steps:
        if work is STAGE_BOUNDARY:
            return
        yield work


def the_algorithm_has_a_name(link: Transport) -> None:
    from tutti.transports.mpi.transport import MpiTransport

    assert isinstance(link, MpiTransport)
    wanted = link.rules.algorithm
    assert link.native_name(1024) == (wanted or "recursive_doubling")
    assert link.native_name(4 * 2**20) == (wanted or "rabenseifner")
    assert (sys.argv[1].partition(":")[2] or None) == wanted


REDUCTIONS: list[Callable[..., None]] = [
    sums,
    sums_of_awkward_tensors,
    sums_are_the_same_bits_everywhere,
    many_sums_under_way,
    the_algorithm_has_a_name,
]

CHECKS = [
    *REDUCTIONS,
    messages_between_all_pairs,
    large_messages,
    tags_keep_messages_apart,
    any_source,
    a_receive_is_not_done_before_its_message,
    layouts_and_dtypes_of_messages,
    channels_do_not_mix,
    channels_between_some_ranks,
    steps_are_taken_beside,
    packets_are_summed,
    failing_steps_say_so,
    a_closed_transport_says_so,
    a_conversation_that_one_rank_closed,
    peers_that_do_not_exist,
    a_rank_that_does_not_answer_is_waited_for_no_longer_than_asked,
]


def loss(world: tutti.World) -> None:
    """Rank 1 of three leaves, and the others say so; then MPI can only be aborted."""
    world.transport.all_reduce(torch.ones(3)).wait()
    if world.rank == 1:
        world.close()
        return
    with pytest.raises(RankLost, match=rf"rank {world.rank}: rank 1 is gone: it has left"):
        world.transport.all_reduce(torch.ones(3)).wait()
    print(f"rank {world.rank} knows", flush=True)
    keys = [f"knows {rank}" for rank in (0, 2)]
    world.transport.membership.set(f"knows {world.rank}", "1")
    world.transport.membership.subset([world.rank]).await_values(keys, "the others")


def main() -> None:
    torch.set_num_threads(1)
    world = tutti.init(transport=sys.argv[1], timeout=timedelta(seconds=20))
    if sys.argv[2:] == ["loss"]:
        return loss(world)
    for check in REDUCTIONS if sys.argv[2:] else CHECKS:
        check(world.transport.channel(check.__name__))
    print(f"rank {world.rank} is content", flush=True)
    return None
