"""Model parallelism by a scheduler: problems are solved as in one process, on any transport and in virtual time."""

from datetime import timedelta

import pytest
import torch
from torch import Tensor

from support import run_ok, run_threads
from tutti.cluster import Cluster, Compute, Link
from tutti.errors import ConfigError, RankLost, ReplicaMismatch
from tutti.launch import init
from tutti.parallel.scheduler import (
    BlockProblem,
    Dynamic,
    Factorisation,
    Lasso,
    Random,
    RoundRobin,
    Scheduler,
    SelectionRule,
    Solution,
    solve,
)
from tutti.simulation.runs.simulate import simulate
from tutti.transports import SingleRankTransport
from tutti.world import World

PENALTY = 20.0
ALONE = SingleRankTransport(timedelta(seconds=20))


def samples(num_samples: int = 300, num_features: int = 120) -> tuple[Tensor, Tensor]:
    """Features that are correlated with the one before; few of them matter."""
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(num_samples, num_features, generator=generator, dtype=torch.float64)
    for number in range(1, num_features):
        if number % 6:
            features[:, number] = 0.8 * features[:, number - 1] + 0.6 * features[:, number]
    truth = torch.zeros(num_features, dtype=torch.float64)
    truth[:: max(17, num_features // 8)] = 2.0
    noise = torch.randn(num_samples, generator=generator, dtype=torch.float64)
    return features, features @ truth + 0.5 * noise


def lasso(world: World, selection: SelectionRule, rounds: int, num_features: int = 120) -> tuple[Solution, Tensor]:
    features, targets = samples(num_features=num_features)
    mine = slice(world.rank, None, world.size)
    problem = Lasso(features[mine], targets[mine], PENALTY, world.transport)
    scheduler = Scheduler(selection=selection, per_round=8)
    return solve(problem, world.transport, scheduler, rounds=rounds), problem.coefficients


def assert_optimal(coefficients: Tensor) -> None:
    """Check the optimality conditions of Lasso: a gradient of ±λ where a coefficient is not 0, at most λ elsewhere."""
    features, targets = samples()
    gradient = features.t() @ (targets - features @ coefficients)
    some = coefficients != 0
    assert 5 < some.sum() < 60
    torch.testing.assert_close(gradient[some], PENALTY * coefficients[some].sign(), rtol=1e-6, atol=1e-6)
    assert gradient.abs().max() < PENALTY + 1e-6


@pytest.mark.parametrize(
    ("transport", "size"),
    [("sockets", 1), ("sockets", 2), ("shared_memory", 3), ("simulated", 4), ("simulated_hosts", 3)],
)
def test_lasso_is_solved_anywhere(transport: str, size: int) -> None:
    results = run_ok(lasso, Dynamic(), 400, size=size, transport=transport)
    assert_optimal(results[0][1])
    assert all(torch.equal(coefficients, results[0][1]) for _, coefficients in results)
    assert all(solution.objective == results[0][0].objective for solution, _ in results)


@pytest.mark.parametrize("selection", [RoundRobin(), Random(), Dynamic(greedy=True)], ids=repr)
def test_lasso_is_solved_with_any_selection(selection: SelectionRule) -> None:
    assert_optimal(lasso(World(0, 1, 0, "host", ALONE), selection, 2500)[1])


def test_dynamic_needs_fewer_updates() -> None:
    world = World(0, 1, 0, "host", ALONE)
    in_turn, _ = lasso(world, RoundRobin(), 600, num_features=600)
    dynamic, _ = lasso(world, Dynamic(), 600, num_features=600)
    reached = next(point for point in dynamic.points if point.objective <= in_turn.objective)
    assert 1.5 * reached.updates <= in_turn.points[-1].updates


def test_solve_ends_at_the_target() -> None:
    features, targets = samples()
    problem = Lasso(features, targets, PENALTY, ALONE)
    start = float(problem.objective())
    solution = solve(problem, ALONE, rounds=1000, target=start / 2, report_every=3)
    assert solution.reached
    assert solution.points[-2].objective > start / 2 >= solution.objective
    assert solution.points[-1].rounds == 3 * (len(solution.points) - 1)


def entries() -> tuple[Tensor, Tensor, Tensor]:
    """Some entries of a matrix of rank 2; rows have very different numbers of them."""
    generator = torch.Generator().manual_seed(2)
    left, right = (torch.randn(size, 2, generator=generator, dtype=torch.float64) for size in (30, 20))
    known = torch.rand(30, 20, generator=generator) < torch.linspace(0.3, 1.0, 30)[:, None]
    rows, columns = known.nonzero(as_tuple=True)
    return rows, columns, (left @ right.t())[rows, columns]


def factorise(world: World, selection: SelectionRule) -> tuple[Solution, Tensor]:
    problem = Factorisation(entries(), rank=2, penalty=0.1, transport=world.transport, seed=world.rank)
    return solve(problem, world.transport, Scheduler(selection=selection, per_round=12), rounds=120), problem.factors


@pytest.mark.parametrize("selection", [RoundRobin(), Dynamic(greedy=True)], ids=repr)
def test_factors_are_found_as_by_one_rank(selection: SelectionRule) -> None:
    ((alone, wanted),) = run_ok(factorise, selection, size=1, transport="sockets")
    assert alone.objective < 0.05 * alone.points[0].objective
    rows, columns, values = entries()
    left = wanted[:30]
    for column in (0, 7, 19):  # Each row is the best there is, beside the others.
        some = left[rows[columns == column]]
        best = torch.linalg.solve(some.t() @ some + 0.1 * torch.eye(2), some.t() @ values[columns == column])
        torch.testing.assert_close(wanted[30 + column], best, rtol=1e-4, atol=1e-4)
    for transport, size in (("shared_memory", 2), ("simulated", 3)):
        results = run_ok(factorise, selection, size=size, transport=transport)
        for _, factors in results:
            torch.testing.assert_close(factors, wanted, rtol=1e-10, atol=1e-10)


def test_virtual_time_is_that_of_the_work_and_of_the_sums() -> None:
    """Two ranks, each with half of the samples; a round's sum is one exchange of messages."""
    link, flops, rounds = Link("1gbit", "100us"), 1e7, 20

    def work() -> Solution:
        world = init()
        features, targets = samples()
        problem = Lasso(features[world.rank :: 2], targets[world.rank :: 2], PENALTY, world.transport)
        return solve(problem, world.transport, Scheduler(selection=RoundRobin(), per_round=4, limit=1), rounds=rounds)

    simulated = simulate(work, workers=2, cluster=Cluster(link=link, compute=Compute(flops)))
    for solution in simulated.results:
        working_s = 4 * 4 * 150 / flops  # Operations for four features of 150 samples, forth and back.
        least_s = rounds * (working_s + 100e-6)
        assert least_s < solution.points[-1].seconds < 1.1 * least_s


def test_a_slow_rank_is_given_less() -> None:
    class Counting(Factorisation):
        given = 0
        pair_operations = 0.0

        def push(self, blocks: Tensor, mine: Tensor) -> Tensor:
            self.given += int(self.loads(blocks[mine]).sum())
            return super().push(blocks, mine)

    def work() -> int:
        world = init()
        problem = Counting(entries(), rank=2, penalty=0.1, transport=world.transport)
        solve(problem, world.transport, Scheduler(selection=RoundRobin(), per_round=20), rounds=200)
        return problem.given

    cluster = Cluster(link=Link("10gbit", "10us"), compute=Compute(1e7))
    even = simulate(work, workers=2, cluster=cluster)
    assert 0.9 < even.results[0] / even.results[1] < 1.1
    uneven = simulate(work, workers=2, cluster=Cluster(link=cluster.link, compute=cluster.compute, slow={1: 3.0}))
    assert uneven.results[0] > 2 * uneven.results[1]
    assert uneven.seconds < 2 * even.seconds  # It would be three times, or so, with as much for each.


class Disagreeing(BlockProblem):
    """A problem in which ranks report different urgent blocks."""

    num_blocks = 100

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def push(self, blocks: Tensor, mine: Tensor) -> Tensor:
        return torch.zeros(len(blocks), 1)

    def pull(self, blocks: Tensor, results: Tensor) -> Tensor:
        return torch.zeros(len(blocks))

    def urgency_increments(self, blocks: Tensor, changes: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tensor([50 + self._rank]), torch.ones(1)

    def objective(self) -> Tensor:
        return torch.ones(())


def test_different_choices_are_an_error_on_all_ranks() -> None:
    def work(world: World) -> None:
        solve(Disagreeing(world.rank), world.transport, rounds=5)

    for result in run_threads(work, size=2, transport="shared_memory"):
        assert isinstance(result, ReplicaMismatch)
        assert "ranks picked different blocks in round 1" in str(result)


def test_a_push_of_another_shape_is_refused() -> None:
    class Wide(Disagreeing):
        def push(self, blocks: Tensor, mine: Tensor) -> Tensor:
            return torch.zeros(len(blocks), 2)

    with pytest.raises(ConfigError, match=r"rank 0: push gave a tensor of \(32, 2\) for 32 blocks of width 1"):
        solve(Wide(0), ALONE, rounds=1)
    with pytest.raises(ConfigError, match="rounds of 0 or more"):
        solve(Wide(0), ALONE, rounds=-1)


@pytest.mark.parametrize("transport", ["sockets", "shared_memory", "simulated"])
def test_a_failed_rank_ends_the_wait_of_the_other(transport: str) -> None:
    class Failing(Disagreeing):
        def push(self, blocks: Tensor, mine: Tensor) -> Tensor:
            if self._rank == 1 and 99 in blocks:
                raise RuntimeError("out of features")
            return super().push(blocks, mine)

        def urgency_increments(self, blocks: Tensor, changes: Tensor) -> tuple[Tensor, Tensor]:
            return blocks, changes

    def work(world: World) -> None:
        solve(Failing(world.rank), world.transport, rounds=100)

    first, second = run_threads(work, size=2, transport=transport)
    assert isinstance(first, RankLost)
    assert isinstance(second, RuntimeError)


def test_divergence_is_an_error() -> None:
    """Coefficients of nearly equal features are updated at once, so that each overshoots."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(50, 1, generator=generator) + 0.01 * torch.randn(50, 40, generator=generator)
    problem = Lasso(features.double(), features[:, 0].double(), 0.1, ALONE)
    with pytest.raises(ConfigError, match=r"the objective is .* lower the scheduler's limit"):
        solve(problem, ALONE, Scheduler(selection=RoundRobin(), limit=1), rounds=1000)


@pytest.mark.parametrize(
    ("features", "targets", "penalty", "message"),
    [
        ((6, 2), (5,), 1.0, r"got \(6, 2\) and \(5,\)"),
        ((6,), (6,), 1.0, r"got \(6,\) and \(6,\)"),
        ((6, 2), (6,), -1.0, "penalty must be 0 or more and finite, got -1.0"),
    ],
)
def test_lasso_refuses(features: tuple[int, ...], targets: tuple[int, ...], penalty: float, message: str) -> None:
    with pytest.raises(ConfigError, match=f"rank 0: Lasso: .*{message}"):
        Lasso(torch.zeros(features), torch.zeros(targets), penalty, ALONE)


def test_factorisation_refuses() -> None:
    rows, columns, values = entries()
    with pytest.raises(ConfigError, match=r"one length, above 0.*rank must be 1 or more, got 0.*penalty must be above"):
        Factorisation((rows[1:], columns, values), rank=0, penalty=0, transport=ALONE)
    with pytest.raises(ConfigError, match="must be int64 and values floating-point"):
        Factorisation((rows.int(), columns, values), rank=2, penalty=1, transport=ALONE)
    with pytest.raises(ConfigError, match="count from 0"):
        Factorisation((rows - 1, columns, values), rank=2, penalty=1, transport=ALONE)
