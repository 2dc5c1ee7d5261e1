"""The contract of collectives: one suite for every algorithm of the registry."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from support import LEVELS, run_ok, run_threads
from tutti import collectives
from tutti.cluster import Link
from tutti.collectives import (
    ALGORITHMS,
    Collective,
    LinkFit,
    local_part,
    mean,
    measure_collectives,
    measure_links,
    parts,
    run,
)
from tutti.collectives.links import _rounds
from tutti.errors import ConfigError, ReplicaMismatch, WeightRefused
from tutti.world import World

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool,
]  # fmt: skip

every_level = pytest.mark.parametrize("transport", [level for level in LEVELS if level != "simulated"])
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)


def whole_numbers(numel: int, dtype: torch.dtype, rank: int) -> Tensor:
    """Return whole numbers so small that their sums are exact in every dtype and every order."""
    generator = torch.Generator().manual_seed(1000 * numel + rank)
    return torch.randint(0, 14, (numel,), generator=generator).to(dtype)


def total(numel: int, dtype: torch.dtype, size: int) -> Tensor:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.stack([whole_numbers(numel, dtype, rank).to(wide) for rank in range(size)]).sum(0).to(dtype)


@every_level
@every_algorithm
@settings(max_examples=3, deadline=None)
@given(size=st.integers(1, 9), numel=st.integers(0, 700), dtype=st.sampled_from(DTYPES))
@example(size=3, numel=0, dtype=torch.float32)
@example(size=9, numel=1, dtype=torch.bfloat16)
@example(size=7, numel=3, dtype=torch.int64)
@example(size=2, numel=300_000, dtype=torch.float32)
def test_sum(algorithm: Collective, transport: str, size: int, numel: int, dtype: torch.dtype) -> None:
    def work(world: World) -> Tensor:
        tensor = whole_numbers(numel, dtype, world.rank)
        algorithm(tensor, world.transport)
        return tensor

    for result in run_ok(work, size=size, transport=transport):
        assert torch.equal(result, total(numel, dtype, size))


@every_level
@every_algorithm
@pytest.mark.parametrize(("size", "dtype"), [(2, torch.bfloat16), (3, torch.float32), (5, torch.bfloat16)])
def test_all_ranks_end_with_the_same_bits(algorithm: Collective, transport: str, size: int, dtype: torch.dtype) -> None:
    """Numbers whose sum depends on the order, a lone zero with a sign, and enough of them to be cut into chunks."""

    def work(world: World) -> Tensor:
        generator = torch.Generator().manual_seed(world.rank)
        tensor = torch.randn(200_001, generator=generator).to(dtype)
        tensor[7] = -0.0
        algorithm(tensor, world.transport)
        return tensor.view(torch.int16 if dtype == torch.bfloat16 else torch.int32)

    results = run_ok(work, size=size, transport=transport)
    for result in results[1:]:
        assert torch.equal(result, results[0])


@every_level
@every_algorithm
def test_layouts(algorithm: Collective, transport: str) -> None:
    """Tensors may be non-contiguous, of any dimension, or views of a larger tensor that is otherwise unchanged."""

    def work(world: World) -> list[Tensor]:
        frame = torch.full((4, 6), 100.0)
        inner = frame[1:3, ::2]
        inner.fill_(world.rank + 1.0)
        scalar, transposed = torch.tensor(2.0), torch.arange(6.0).reshape(2, 3).t()
        for tensor in (inner, scalar, transposed):
            algorithm(tensor, world.transport)
        return [frame, scalar, transposed]

    for frame, scalar, transposed in run_ok(work, size=3, transport=transport):
        expected = torch.full((4, 6), 100.0)
        expected[1:3, ::2] = 6.0
        assert torch.equal(frame, expected)
        assert float(scalar) == 6.0
        assert torch.equal(transposed, 3 * torch.arange(6.0).reshape(2, 3).t())


@every_level
@every_algorithm
@settings(max_examples=3, deadline=None)
@given(
    weights=st.lists(st.integers(0, 50), min_size=1, max_size=5).filter(any),
    dtype=st.sampled_from([torch.float64, torch.complex128]),
)
@example(weights=[3, 3, 3], dtype=torch.float64)
def test_mean(algorithm: Collective, transport: str, weights: list[int], dtype: torch.dtype) -> None:
    def work(world: World) -> Tensor:
        tensor = whole_numbers(40, dtype, world.rank)
        if weights[world.rank] == 0:
            tensor.fill_(float("nan"))  # Must not count.
        mean(tensor, world.transport, algorithm, float(weights[world.rank]))
        return tensor

    results = run_ok(work, size=len(weights), transport=transport)
    terms = [weight * whole_numbers(40, dtype, rank) for rank, weight in enumerate(weights) if weight]
    expected = torch.stack(terms).sum(0) / sum(weights)
    for result in results:
        assert torch.equal(result, results[0])
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@every_level
@every_algorithm
def test_steps_run_beside_the_caller(algorithm: Collective, transport: str) -> None:
    def work(world: World) -> list[float]:
        tensors = [torch.full((50_000,), float(number + world.rank)) for number in range(6)]
        started = [world.transport.start(algorithm.steps(tensor, world.transport)) for tensor in tensors]
        for each in started:
            each.wait()
            assert each.done()
        return [float(tensor[-1]) for tensor in tensors]

    for result in run_ok(work, size=3, transport=transport):
        assert result == [3.0 * number + 3 for number in range(6)]


@every_level
@settings(max_examples=15, deadline=None)
@given(size=st.integers(1, 9), numel=st.integers(0, 700), dtype=st.sampled_from(DTYPES))
@example(size=4, numel=2, dtype=torch.float32)
def test_reduce_scatter_all_gather_and_broadcast(transport: str, size: int, numel: int, dtype: torch.dtype) -> None:
    def work(world: World) -> tuple[Tensor, Tensor, Tensor]:
        scattered, handed = (whole_numbers(numel, dtype, world.rank) for _ in range(2))
        collectives.reduce_scatter(scattered, world.transport)
        mine = local_part(scattered, world.transport).clone()
        gathered = torch.zeros(numel, dtype=dtype)
        local_part(gathered, world.transport).copy_(mine)
        collectives.all_gather(gathered, world.transport)
        collectives.broadcast(handed, world.transport)
        return mine, gathered, handed

    expected = total(numel, dtype, size)
    for rank, (mine, gathered, handed) in enumerate(run_ok(work, size=size, transport=transport)):
        assert torch.equal(mine, expected[parts(numel, size)[rank]])
        assert torch.equal(gathered, expected)
        assert torch.equal(handed, whole_numbers(numel, dtype, 0))


@every_level
@every_algorithm
def test_tensors_that_differ_are_named_on_every_rank(algorithm: Collective, transport: str) -> None:
    """Of another length, of another dtype, and empty; ranks can go on after each."""
    odd = (torch.ones(11), torch.ones(10, dtype=torch.int32), torch.ones(0))

    def work(world: World) -> list[str]:
        said = []
        for each in odd:
            with pytest.raises(ReplicaMismatch) as caught:
                algorithm(each.clone() if world.rank == 1 else torch.ones(10), world.transport)
            said.append(str(caught.value))
        return said

    for rank, said in enumerate(run_ok(work, size=3, transport=transport)):
        for text, each in zip(said, odd, strict=True):
            assert text.startswith(f"rank {rank}: {algorithm.name} needs tensors of one length and dtype")
            assert "rank 0 has 10 × torch.float32" in text
            assert f"rank 1 has {each.numel()} × {each.dtype}" in text


def test_different_collectives_are_found_out() -> None:
    def work(world: World) -> None:
        (collectives.ring if world.rank else collectives.tree)(torch.ones(4), world.transport)

    for result in run_threads(work, size=3, transport="sockets"):
        assert isinstance(result, ReplicaMismatch)
        assert "not all of them called" in str(result)


@every_algorithm
def test_a_mean_of_integers_is_refused(algorithm: Collective) -> None:
    def work(world: World) -> None:
        with pytest.raises(ConfigError, match=r"mean of torch\.int64 tensors is not an integer"):
            mean(torch.ones(3, dtype=torch.int64), world.transport, algorithm)

    run_ok(work, size=2, transport="sockets")


@every_algorithm
def test_a_weight_of_nan_is_refused_on_every_rank(algorithm: Collective) -> None:
    def work(world: World) -> None:
        mean(torch.ones(3), world.transport, algorithm, float("nan") if world.rank == 1 else 1.0)

    results = run_threads(work, size=3, transport="sockets")
    assert [type(result) for result in results] == [WeightRefused] * 3
    assert [result.ranks for result in results] == [[1]] * 3


def test_hierarchical_sends_over_the_network_what_one_rank_per_host_would() -> None:
    """Two hosts of two ranks: n bytes from each leader, none from the others; the flat ring sends 1.5 n from each."""

    def work(world: World) -> tuple[int, int]:
        tensor = torch.ones(40_000)
        before = world.transport.bytes_sent
        run(collectives.hierarchical.steps(tensor, world.transport))
        between = world.transport.bytes_sent
        run(collectives.ring.steps(tensor, world.transport))
        return between - before, world.transport.bytes_sent - between

    assert run_ok(work, size=4, transport="hosts") == [(160_000, 240_000), (0, 240_000)] * 2


@pytest.mark.parametrize("size", range(1, 10))
def test_costs_are_those_of_the_literature(size: int) -> None:
    """At powers of two costs equal the textbook formulas; elsewhere they satisfy inequalities."""
    link, num_bytes = Link("1gbit", "50us"), 2 * 10**5
    cost = {name: each.cost(size, num_bytes, link) for name, each in ALGORITHMS.items()}
    assert all(seconds == 0 for seconds in cost.values()) == (size == 1)
    alpha, beta, rounds = 50e-6, 8e-9, math.log2(size)
    assert cost["ring"] == pytest.approx(2 * (size - 1) * (alpha + num_bytes / size * beta))
    if rounds.is_integer():
        assert cost["tree"] == pytest.approx(2 * rounds * (alpha + num_bytes * beta))
        assert cost["recursive_doubling"] == pytest.approx(rounds * (alpha + num_bytes * beta))
        expected = 2 * rounds * alpha + 2 * (size - 1) / size * num_bytes * beta
        assert cost["butterfly"] == pytest.approx(expected)
    small = {name: each.cost(size, 8, link) for name, each in ALGORITHMS.items()}
    assert small["recursive_doubling"] <= small["tree"] <= small["ring"] or size < 4


def test_a_ring_of_long_blocks_waits_for_one_latency() -> None:
    link, num_bytes = Link("1gbit", "50us"), 2**24
    assert ALGORITHMS["ring"].cost(4, num_bytes, link) == pytest.approx(6 * num_bytes / 4 * 8e-9 + 50e-6)
    slow_to_answer = Link("100gbit", "50us")  # There the latency of a chunk is longer than a block.
    assert ALGORITHMS["ring"].cost(4, 2**20 + 4, slow_to_answer) == pytest.approx(7 * 50e-6 + 3 * 2**20 / 4 * 8e-11)


def test_parts_cover_everything_in_order() -> None:
    for numel in range(20):
        for count in range(1, 9):
            cut = parts(numel, count)
            assert [index for part in cut for index in range(numel)[part]] == list(range(numel))
            assert len(cut) == count


def test_fit_finds_a_link_and_says_how_well_it_fits() -> None:
    link = Link("100mbit", "200us")
    sizes = [64, 1024, 16384, 262144, 1048576]
    exact = LinkFit.from_points([(size, link.seconds(size)) for size in sizes])
    assert exact.link.bits_per_s == pytest.approx(link.bits_per_s)
    assert exact.link.latency_s == pytest.approx(link.latency_s)
    assert exact.residual < 1e-6
    wobble = [(size, link.seconds(size) * (1.2 if number % 2 else 0.8)) for number, size in enumerate(sizes)]
    noisy = LinkFit.from_points(wobble)
    assert noisy.residual > 0.1
    # The first bytes cost nothing.
    burst = LinkFit.from_points([(size, link.seconds(max(0, size - 10_000))) for size in sizes])
    assert burst.link.bits_per_s == pytest.approx(link.bits_per_s)
    assert burst.link.latency_s == pytest.approx(link.latency_s, rel=0.05)


@every_level
def test_links_are_measured_alike_on_every_rank(transport: str) -> None:
    def work(world: World) -> list[tuple[tuple[int, int], float]]:
        measured = measure_links(world.transport)
        assert measured.link in [fit.link for fit in measured.fits.values()]
        return [(pair, fit.link.bits_per_s) for pair, fit in measured.fits.items()]

    results = run_ok(work, size=3, transport=transport)
    assert [pair for pair, _ in results[0]] == [(0, 1), (0, 2), (1, 2)]
    assert results[1] == results[2] == results[0]


@every_level
def test_choices_are_the_same_on_every_rank(transport: str) -> None:
    def work(world: World) -> list[str]:
        choice = measure_collectives(world.transport)
        for num_bytes in (1, 10**9):
            costs = choice.costs(num_bytes)
            assert costs[choice.best(num_bytes).name] == min(costs.values())
        return [choice.best(2**exponent).name for exponent in range(30)]

    results = run_ok(work, size=4, transport=transport)
    assert results == [results[0]] * 4
    assert transport != "shared_memory" or set(results[0]) == {"native"}


@pytest.mark.parametrize("shape", [(4, 3), ()])
def test_parts_are_of_flat_tensors(shape: tuple[int, ...]) -> None:
    def work(world: World) -> None:
        with pytest.raises(ConfigError, match="local_part needs one dimension"):
            local_part(torch.ones(shape), world.transport)

    run_ok(work, size=2, transport="sockets")


def test_a_negative_weight_is_refused_on_every_rank() -> None:
    def work(world: World) -> None:
        with pytest.raises(ConfigError, match=r"weights must be 0 or more, but rank 1 gave -2"):
            mean(torch.ones(3), world.transport, collectives.ring, -2.0 if world.rank else 1.0)

    run_ok(work, size=2, transport="sockets")


def test_a_mean_of_integers_on_one_rank_only() -> None:
    """Every rank raises, and the ranks can still communicate afterwards."""

    def work(world: World) -> float:
        with pytest.raises(ReplicaMismatch, match=r"rank 1 has 3 × torch\.int64"):
            mean(torch.ones(3, dtype=torch.int64 if world.rank else torch.float32), world.transport, collectives.ring)
        after = torch.ones(5)
        collectives.ring(after, world.transport)
        return float(after[0])

    assert run_ok(work, size=2, transport="sockets") == [2.0, 2.0]


@pytest.mark.parametrize("hosts", [["a"], ["a", "b", "c"], ["a", "a", "b", "b"], ["a"] * 5, ["a", "b"] * 4], ids=str)
def test_pairs_that_are_measured(hosts: list[str]) -> None:
    """Every pair is measured once, and no host is in two pairs at the same time."""
    rounds = list(_rounds(hosts))
    pairs = [pair for pairs in rounds for pair in pairs]
    assert sorted(pairs) == [(one, two) for one in range(len(hosts)) for two in range(one + 1, len(hosts))]
    for together in rounds:
        busy = [host for pair in together for host in {hosts[rank] for rank in pair}]
        assert len(busy) == len(set(busy)) or len(set(hosts)) == 1
