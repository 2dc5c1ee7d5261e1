"""Choices of the scheduler: selection rules, independent blocks, balanced loads, and similarity of features."""

import math

import numpy as np
import pytest
import torch

from tutti.errors import ConfigError
from tutti.parallel.scheduler import Dynamic, Random, RoundRobin, Scheduler
from tutti.parallel.scheduler.choose import balance_loads, select_independent
from tutti.parallel.scheduler.sketch import NUM_BITS, SimHash


def test_round_robin_offers_rejected_blocks_first() -> None:
    selector = RoundRobin().start(6, seed=0)
    assert selector.candidates(4) == [0, 1, 2, 3]
    selector.mark_updated([0, 2])
    assert selector.candidates(4) == [1, 3, 4, 5]
    selector.mark_updated([1, 3, 4, 5])
    assert selector.candidates(9) == [0, 2, 1, 3, 4, 5]


def test_random_draws_without_replacement() -> None:
    selector = Random().start(50, seed=3)
    rounds = [selector.candidates(20) for _ in range(40)]
    assert all(len(set(each)) == 20 for each in rounds)
    assert set().union(*rounds) == set(range(50))
    assert rounds[0] == Random().start(50, seed=3).candidates(20)


@pytest.mark.parametrize("greedy", [False, True])
def test_urgent_blocks_come_more_often_and_all_come(greedy: bool) -> None:
    num_blocks, urgent = 400, np.array([7, 300])
    selector = Dynamic(explore=0.1, greedy=greedy).start(num_blocks, seed=1)
    times = np.zeros(num_blocks, dtype=int)
    for _ in range(400):
        blocks = selector.candidates(20)
        assert len(set(blocks)) == 20
        times[blocks] += 1
        selector.mark_updated(blocks)
        selector.raise_urgency(urgent, np.array([1.0, 0.5]))
    assert times.min() >= 1
    assert times[urgent].min() > 380 > 10 * np.median(times)


def test_without_urgency_blocks_come_in_round_robin_order() -> None:
    selector = Dynamic().start(30, seed=0)
    for start in (0, 10, 20):
        blocks = selector.candidates(10)
        assert blocks == list(range(start, start + 10))
        selector.mark_updated(blocks)


def test_exploration_grows_while_explored_blocks_are_urgent() -> None:
    """Some blocks stay urgent all the time; the others are urgent whenever they are visited, or never."""
    looked = []
    for need in (1.0, 0.0):
        selector = Dynamic().start(1000, seed=0)
        times = np.zeros(1000, dtype=int)
        for _ in range(100):
            blocks = selector.candidates(10)
            times[blocks] += 1
            amounts = np.array([50.0 if block < 20 else need for block in blocks])
            selector.mark_updated(blocks)
            selector.raise_urgency(np.array(blocks), amounts)
        looked.append((times[20:] > 0).sum())
    assert looked[0] > 1.2 * looked[1]


def test_no_two_dependent_blocks_are_chosen() -> None:
    generator = torch.Generator().manual_seed(0)
    dependence = torch.rand(40, 40, generator=generator)
    dependence = ((dependence + dependence.t()) / 2).fill_diagonal_(1).numpy()
    chosen = select_independent(dependence, 0.8, 40)
    assert 5 < len(chosen) < 40
    assert chosen[0] == 0
    for index in range(40):
        conflicts = [other for other in chosen if other < index and dependence[other, index] > 0.8]
        assert (index in chosen) == (not conflicts)  # The first come first, and none is rejected without a conflict.
    assert select_independent(dependence, 0.8, 3) == chosen[:3]
    assert select_independent(dependence, 1.0, 99) == list(range(40))


def test_loads_are_balanced_by_speed() -> None:
    loads = [9.0, 1.0, 5.0, 5.0, 2.0, 8.0, 3.0, 7.0]
    shares = balance_loads(loads, np.ones(2))
    assert sorted([*shares[0], *shares[1]]) == list(range(8))
    sums = [sum(loads[index] for index in share) for share in shares]
    assert sums == [20.0, 20.0]
    many = [1.0] * 300
    assert [len(share) for share in balance_loads(many, np.array([1.0, 2.0]))] == [200, 100]
    assert balance_loads([4.0], np.ones(2)) == [[0], []]
    assert balance_loads([4.0, 1.0], np.array([3.0, 1.0])) == [[1], [0]]  # Not the heaviest to the slowest.


def test_a_sketch_estimates_correlations() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(2000, generator=generator)
    wanted = [1.0, 0.95, 0.7, -0.7, 0.3, 0.0]
    vectors = [each * base + math.sqrt(1 - each**2) * torch.randn(2000, generator=generator) for each in wanted]
    sketch = SimHash(torch.stack(vectors) @ torch.randn(2000, NUM_BITS, generator=generator))
    found = sketch.pairwise_similarity(np.arange(6))
    assert found[0, 0] == 1
    assert np.allclose(found, found.T)
    assert np.abs(found[0] - np.abs(wanted)).max() < 0.2
    others, alike = sketch.neighbours(0, 0.5)
    assert others.tolist() == [1, 2, 3]
    assert alike.tolist() == found[0, 1:4].tolist()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dynamic(explore=0), "explore must be above 0 and at most 1, got 0"),
        (lambda: Scheduler(per_round=0), "per_round must be 1 or more, got 0"),
        (lambda: Scheduler(limit=1.5), "limit must be from 0 to 1, got 1.5"),
        (lambda: Scheduler(selection="dynamic"), r"selection must be an object such as Dynamic\(\), got 'dynamic'"),
    ],
)
def test_wrong_settings_are_refused(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message):
        make()
