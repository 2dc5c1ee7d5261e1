"""Data of worlds that lose and gain ranks in the middle of loops: every sample of every epoch once."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import tutti
from one_thread import state_of, step, worlds
from tutti.data.trail import Trail
from tutti.world import World

NUM_EPOCHS = 3


class Regrouping:
    """Changes the ranks of a world at its next boundary, as a job would."""

    def __init__(self) -> None:
        self.change: Callable[[], None] | None = None

    def boundary(self, *, at_end: bool = False, is_over: bool = False) -> None:
        if self.change is not None:
            change, self.change = self.change, None
            change()

    def arrive(self) -> None:
        return

    def arrived(self) -> None:
        return


@dataclass
class Case:
    """Data, and what happens to the ranks that train on it."""

    kind: str
    num_samples: int
    batch_size: int
    keep: str
    size: int
    num_changes: int
    accumulate: int
    spread: float
    """How much faster some ranks are than others."""
    seed: int

    def shard(self, world: World) -> Any:
        numbers = TensorDataset(torch.arange(self.num_samples))
        if self.kind == "dataset":
            return tutti.shard(numbers, world=world)
        return tutti.shard(DataLoader(numbers, self.batch_size, shuffle=True), keep=self.keep, world=world)  # type: ignore[arg-type]


@dataclass(eq=False)
class Rank:
    """The training loop of one rank."""

    world: World
    case: Case
    states: list[dict[str, Any]] = field(default_factory=list)
    used: list[tuple[int, list[int]]] = field(default_factory=list)
    waiting: list[tuple[int, list[int]]] = field(default_factory=list)
    num_loops: int = 0
    num_steps: int = 0
    """Since ranks have changed."""
    is_over: bool = False

    def __post_init__(self) -> None:
        self.regrouping = Regrouping()
        self.world.elastic = SimpleNamespace(  # type: ignore[assignment]
            data=set(), data_states=self.states, regrouping=self.regrouping, has_joined=False
        )
        self.data = self.case.shard(self.world)
        self.loop = self._loop()

    def _loop(self) -> Iterator[tuple[int, list[int]]]:
        for epoch in self.data.epochs(NUM_EPOCHS):
            self.num_loops += 1
            for (batch,) in epoch:
                samples = batch.reshape(-1).tolist() if self.world.sample_counts.num_samples else []
                yield self.data._cursor.epoch, samples

    def draw(self) -> None:
        """Draw the batches of a step."""
        for _ in range(self.case.accumulate):
            try:
                self.waiting.append(next(self.loop))
            except StopIteration:
                self.is_over = True
                return

    def advance(self) -> None:
        """Take a step."""
        self.draw()
        if self.waiting:
            step(self.world)
            self.num_steps += 1
            self.used += self.waiting
            self.waiting = []


def regroup(ranks: list[Rank], lost: list[Rank]) -> list[Rank]:
    """Change the ranks, as `ElasticJob` does; return those that go on."""
    left = [rank for rank in ranks if rank not in lost]
    source = max(left, key=lambda rank: Trail.read(rank.data.trail).num_steps)
    positions = []
    for rank in ranks:
        known = source.data.position_after([rank.data.trail for rank in left], rank.num_steps)
        positions.append(list(rank.data.position) if rank in left else known)
        if rank.num_steps <= source.num_steps or rank.case.accumulate == 1:
            assert known == list(rank.data.position), "the longest trail says where each of them is"
    size = len(left)
    for number, rank in enumerate(left):

        def change(rank: Rank = rank, number: int = number) -> None:
            rank.world.rank, rank.world.size, rank.num_steps = number, size, 0
            rank.waiting.clear()
            rank.data.regroup(positions)

        rank.regrouping.change = change
    for rank in left:  # They come to their next boundary, and go on.
        rank.advance()
    return left


def run(case: Case) -> None:
    rng = random.Random(case.seed)
    ranks = [Rank(world, case) for world in worlds(case.size)]
    everybody = list(ranks)
    speeds = {rank: 1 + case.spread * rng.random() for rank in ranks}
    for _ in range(case.num_changes):
        for _ in range(rng.randrange(1, 12 * len(ranks))):
            if any(rank.is_over for rank in ranks):
                break
            rank = rng.choices(ranks, [speeds[each] for each in ranks])[0]
            rank.advance()
        if len(ranks) == 1 or any(rank.is_over for rank in ranks):
            break
        for rank in ranks:
            if rng.random() < 0.3:
                rank.draw()  # A loss makes this step void: its batch comes again.
        if any(rank.is_over for rank in ranks):
            break
        lost = rng.sample(ranks, rng.randrange(1, len(ranks)))
        if case.accumulate > 1:  # Where a step takes items of two epochs, it cannot be said what comes behind a trail.
            most = max(rank.num_steps for rank in ranks if rank not in lost)
            lost = [rank for rank in lost if rank.num_steps <= most]
        ranks = regroup(ranks, lost)
    num_left = {}
    for rank in ranks:
        before = rank.num_steps
        while not rank.is_over or rank.waiting:
            rank.advance()
        num_left[rank] = rank.num_steps
        assert rank.num_steps >= before
    assert len(set(num_left.values())) == 1, "all ranks that are left take as many steps"
    used = Counter((epoch, sample) for rank in everybody for epoch, samples in rank.used for sample in samples)
    assert set(used.values()) == {1}, "no sample comes twice"
    assert len(used) == NUM_EPOCHS * case.num_samples, "no sample is left out"
    assert all(rank.num_loops == NUM_EPOCHS for rank in ranks), "no loop ends early, or runs twice"


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.integers(2, 5))
    batch_size = draw(st.integers(1, 4))
    return Case(
        draw(st.sampled_from(["loader", "dataset"])),
        draw(st.integers(size * batch_size, size * batch_size + 50)),
        batch_size,
        draw(st.sampled_from(["global", "local"])),
        size,
        draw(st.integers(1, 4)),
        draw(st.integers(1, 2)),
        draw(st.sampled_from([0.0, 1.0, 20.0])),
        draw(st.integers(0, 10**6)),
    )


@settings(max_examples=200, deadline=None)
@given(cases())
def test_every_sample_is_used_once_whoever_is_lost(case: Case) -> None:
    run(case)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3), st.booleans()), max_size=60))
def test_a_trail_knows_the_position_after_every_step(moves: list[tuple[int, int, bool]]) -> None:
    """Each move is some steps, and the items that were committed by them, or the end of the epoch."""
    trail, num_steps, position = Trail((2, 5)), 0, (2, 5)
    known = {0: position}
    for steps, items, ends in moves:
        position = (position[0] + 1, 0) if ends else (position[0], position[1] + items)
        known |= {num_steps + number: position for number in range(1, steps + 1)}
        num_steps += steps
        trail.add(num_steps, position)
    assert trail.num_steps == num_steps
    read = Trail.read(trail.export())
    assert {number: read.after(number) for number in known} == known


def test_a_trail_goes_on_as_before_and_is_short() -> None:
    trail = Trail((0, 0))
    for number in range(1, 1000):
        trail.add(number, (number // 100, 2 * (number % 100)))
    assert trail.after(1003) == (9, 206)
    assert len(trail.export()) == 10


def test_a_trail_of_irregular_steps_keeps_the_newest_only() -> None:
    trail, position = Trail((0, 0)), 0
    for number in range(1, 10_000):
        position += 1 + number * number % 7
        trail.add(number, (0, position))
    assert len(trail._runs) == len(trail.export()) <= 64
    assert trail.after(9_999) == (0, position)
    assert trail.after(1) == trail._runs[0].position(0), "no sample of a rank that is far behind is used twice"


def test_a_world_whose_ranks_stay_the_same_keeps_no_trail() -> None:
    (world,) = worlds(1)
    data: Any = tutti.shard(TensorDataset(torch.arange(9)), world=world)
    with patch.object(Trail, "add", side_effect=AssertionError):
        for _ in data:
            step(world)
    assert data._cursor.position == (1, 0)


def elastic_world(states: list[dict[str, Any]]) -> World:
    """The world of a rank that has missed what these states have."""
    (world,) = worlds(1)
    world.elastic = SimpleNamespace(data=set(), data_states=states, regrouping=Regrouping(), has_joined=False)  # type: ignore[assignment]
    return world


def loader_of(world: World, first: int = 0) -> Any:
    return tutti.shard(DataLoader(TensorDataset(torch.arange(first, first + 20)), 2), world=world)


def advanced(num_steps: int, data: Any) -> Any:
    """The data after so many steps, of 10 in an epoch."""
    epochs = data.epochs(9)
    for _ in range(-(-num_steps // 10)):
        for number, _ in enumerate(next(epochs), 1):
            step(data._world)
            if number == num_steps:
                return data
        num_steps -= 10
    return data


STARTS: dict[str, Callable[[Any], Any]] = {
    "loop": lambda data: None,
    "epochs": lambda data: next(data.epochs(9)),
    "epoch": lambda data: data.epoch,
    "set_epoch": lambda data: data.set_epoch(2),
    "len": len,
}


@pytest.mark.parametrize("start", STARTS)
def test_data_made_before_the_others_state_has_come_continues_from_it(start: str) -> None:
    others = advanced(23, loader_of(elastic_world([])))
    data = loader_of(world := elastic_world([]))
    world.elastic.data_states = [others.export()]  # type: ignore[union-attr]
    STARTS[start](data)
    left = [batch.tolist() for (batch,) in data]
    step(world)
    assert len(left) == 7
    assert data.position == (3, 0)
    assert data.agreed_position == (2, 3)
    assert world.elastic.data_states == []  # type: ignore[union-attr]


def test_a_saved_position_is_that_of_the_others_before_the_first_loop() -> None:
    others = advanced(13, loader_of(elastic_world([])))
    data = loader_of(world := elastic_world([]))
    world.elastic.data_states = [others.export()]  # type: ignore[union-attr]
    world.elastic.regrouping = None  # type: ignore[union-attr]
    assert state_of([data])["positions"] == [[1, 3]]


@pytest.mark.parametrize("same_order", [True, False])
def test_data_that_looks_the_same_continues_by_its_number(same_order: bool) -> None:
    """The others have begun to iterate over the second of two loaders before the first."""
    others = [advanced(3, loader_of(elastic_world([]))), advanced(17, loader_of(elastic_world([]), 100))]
    others[1].number = 1
    states = [data.export() for data in (others if same_order else reversed(others))]
    world = elastic_world(states)
    data = [loader_of(world), loader_of(world, 100)]
    assert [each.position for each in data] == [(0, 3), (1, 7)]


def test_data_made_in_another_order_continues_when_its_loop_begins() -> None:
    others = advanced(13, loader_of(elastic_world([])))
    others.number = 1
    data = loader_of(world := elastic_world([others.export()]))
    unlike = tutti.shard(TensorDataset(torch.arange(20)), world=world)
    assert data.epoch == 0, "data that is made later may be the one"
    assert [epoch.epoch for epoch in data.epochs(4)] == [1, 2, 3]
    assert unlike.epoch == 0
