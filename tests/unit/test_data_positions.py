"""Positions in every kind of data: a run that continues gets what the undisturbed one gets, and each sample once."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import tutti
from one_thread import state_of, step, worlds
from support import run_ok
from tutti.data import GlobalBatches
from tutti.errors import ConfigError
from tutti.world import World

NUM_SAMPLES = 20


def numbers() -> TensorDataset:
    return TensorDataset(torch.arange(NUM_SAMPLES))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(11)


class Batches(Sampler[list[int]]):
    """A batch sampler of uneven batches, with a random generator of its own."""

    def __init__(self, generator: Any, shuffle: Callable[[Any], list[int]]) -> None:
        self.source, self.shuffle = generator, shuffle

    def __iter__(self) -> Iterator[list[int]]:
        order = self.shuffle(self.source)
        return iter([order[start : start + 1 + start % 4] for start in (0, 1, 3, 7, 11, 15, 19)])

    def __len__(self) -> int:
        return 7


class ByEpoch(Sampler[int]):
    """An order that follows from the epoch that the loop sets."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.epoch).sample(range(NUM_SAMPLES), NUM_SAMPLES))

    def __len__(self) -> int:
        return NUM_SAMPLES


class WithState(Sampler[int]):
    """An order that follows from a state that only the sampler knows."""

    def __init__(self) -> None:
        self._counts = {"first": 0}

    def state_dict(self) -> dict[str, int]:
        return dict(self._counts)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._counts.update(state)

    def __iter__(self) -> Iterator[int]:
        self._counts["first"] += 3
        return iter([(self._counts["first"] + number) % NUM_SAMPLES for number in range(NUM_SAMPLES)])

    def __len__(self) -> int:
        return NUM_SAMPLES


def python_order(source: random.Random) -> list[int]:
    return source.sample(range(NUM_SAMPLES), NUM_SAMPLES)


def numpy_order(source: Any) -> list[int]:
    return source.permutation(NUM_SAMPLES).tolist()


def torch_order(source: torch.Generator) -> list[int]:
    return torch.randperm(NUM_SAMPLES, generator=source).tolist()


def weighted() -> Sampler[int]:
    return WeightedRandomSampler(torch.arange(1.0, NUM_SAMPLES + 1).tolist(), NUM_SAMPLES, generator=seeded())


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(numbers(), 2),
    "shuffled": lambda: DataLoader(numbers(), 2, shuffle=True),
    "shuffled with a generator": lambda: DataLoader(numbers(), 2, shuffle=True, generator=seeded()),
    "drop_last": lambda: DataLoader(numbers(), 3, shuffle=True, drop_last=True),
    "weighted": lambda: DataLoader(numbers(), 2, sampler=weighted()),
    "replacement": lambda: DataLoader(
        numbers(), 2, sampler=RandomSampler(numbers(), replacement=True, generator=seeded())
    ),
    "subset": lambda: DataLoader(numbers(), 2, sampler=SubsetRandomSampler(range(5, 20), generator=seeded())),
    "batch sampler of torch": lambda: DataLoader(
        numbers(), batch_sampler=BatchSampler(RandomSampler(range(20), generator=seeded()), 2, drop_last=False)
    ),
    "global batches": lambda: DataLoader(numbers(), batch_sampler=GlobalBatches(NUM_SAMPLES, 4, 2, seed=1)),
    "own, torch": lambda: DataLoader(numbers(), batch_sampler=Batches(seeded(), torch_order)),
    "own, numpy": lambda: DataLoader(numbers(), batch_sampler=Batches(np.random.default_rng(2), numpy_order)),
    "own, old numpy": lambda: DataLoader(numbers(), batch_sampler=Batches(np.random.RandomState(2), numpy_order)),
    "own, python": lambda: DataLoader(numbers(), batch_sampler=Batches(random.Random(2), python_order)),
    "own, by epoch": lambda: DataLoader(numbers(), 2, sampler=ByEpoch()),
    "own, with a state": lambda: DataLoader(numbers(), 2, sampler=WithState()),
}


def epochs_of(data: Any, num_epochs: int = 3) -> list[list[list[int]]]:
    return [[torch.as_tensor(batch[0]).reshape(-1).tolist() for batch in epoch] for epoch in data.epochs(num_epochs)]


@pytest.mark.parametrize("name", LOADERS)
def test_a_continued_run_gets_the_batches_of_the_undisturbed_one(name: str) -> None:
    def make(world: World) -> Any:
        return tutti.shard(LOADERS[name](), world=world)

    undisturbed = epochs_of(make(worlds(1)[0]))
    if name != "in order":
        assert undisturbed[0] != undisturbed[1], "each epoch has its own order"
    for num_done in (0, 1):
        world = worlds(1)[0]
        data = make(world)
        for epoch in data.epochs(num_done + 1):
            for _ in zip(range(3 if data.epoch == num_done else 100), epoch, strict=False):
                step(world)
        state = state_of([data])
        again = make(worlds(1)[0])
        again.load_state_dict(state)
        assert epochs_of(again) == [undisturbed[num_done][3:], *undisturbed[num_done + 1 :]]


@pytest.mark.parametrize("name", ["shuffled", "own, torch", "global batches"])
def test_a_state_that_was_only_loaded_is_complete(name: str) -> None:
    undisturbed = epochs_of(tutti.shard(LOADERS[name](), world=worlds(1)[0]))
    world = worlds(1)[0]
    data = tutti.shard(LOADERS[name](), world=world)
    for _ in zip(range(2), data, strict=False):
        step(world)
    state = state_of([data])
    for _ in range(2):
        data = tutti.shard(LOADERS[name](), world=worlds(1)[0])
        data.load_state_dict(state)
        state = state_of([data])
        assert epochs_of(data) == [undisturbed[0][2:], *undisturbed[1:]]


@pytest.mark.parametrize("name", ["shuffled with a generator", "own, torch", "global batches"])
def test_a_damaged_order_is_refused(name: str) -> None:
    data = tutti.shard(LOADERS[name](), world=worlds(1)[0])
    next(iter(data))
    state = state_of([data])
    for key in {"loader_generator", "drawn", "generators", "starts"} & state.keys():
        with pytest.raises(ConfigError, match="the position is damaged"):
            tutti.shard(LOADERS[name](), world=worlds(1)[0]).load_state_dict({**state, key: [3]})


# --- samplers of the user's own, whose batches rank 0 draws: worlds of several sizes, as threads ---


def _part_of_a_run(world: World, name: str, state: dict[str, Any] | None, num_steps: int) -> Any:
    """Take some steps, as all ranks do; return what was used, by epoch, and the state after it."""
    for counts in (world.sample_counts.distributed, world.sample_counts.models):
        counts.add(MODEL)
    data = tutti.shard(LOADERS[name](), world=world)
    if state is not None:
        data.load_state_dict(state)
    used: list[tuple[int, int]] = []
    for epoch in data.epochs(2):
        for (batch,) in epoch:
            used += [(data.epoch, int(number)) for number in batch if world.sample_counts.num_samples]
            step(world)
            num_steps -= 1
            if num_steps == 0:
                return used, data.state_dict()
    return used, data.state_dict()


MODEL = torch.nn.Linear(1, 1)


@pytest.mark.parametrize("name", ["own, numpy", "subset", "own, by epoch", "shuffled"])
def test_worlds_of_several_sizes_use_every_sample_once(name: str) -> None:
    used: list[tuple[int, int]] = []
    state = None
    for size, num_steps in ((2, 2), (3, 2), (1, -1)):
        results = run_ok(_part_of_a_run, name, state, num_steps, size=size, transport="sockets")
        used += [item for part, _ in results for item in part]
        states = [state for _, state in results]
        assert all(str(other) == str(states[0]) for other in states)
        state = states[0]
    first = 5 if name == "subset" else 0
    assert Counter(used) == Counter((epoch, number) for epoch in range(2) for number in range(first, NUM_SAMPLES))


# --- iterables ---


class Stream(IterableDataset[int]):
    """An iterable dataset that knows neither its length nor its place."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(NUM_SAMPLES))


class Resumable:
    """An iterable that knows its place, and counts what is read."""

    def __init__(self) -> None:
        self.place = self.num_read = 0
        self._continues = False

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place, self._continues = state["place"], True

    def __iter__(self) -> Iterator[int]:
        self.place = self.place if self._continues else 0
        self._continues = False
        for item in range(self.place, NUM_SAMPLES):
            self.place = item + 1
            self.num_read += 1
            yield item


ITERABLES: dict[str, Callable[[], Any]] = {
    "range": lambda: iter_again(range(NUM_SAMPLES)),
    "iterable dataset": Stream,
    "loader": lambda: DataLoader(Stream(), batch_size=None),
    "loader with workers": lambda: DataLoader(Stream(), batch_size=None, num_workers=1),
    "with a state": Resumable,
}


class iter_again:
    """An iterable and nothing else."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self) -> Iterator[int]:
        return iter(self.items)


def items_of(data: Any, num_epochs: int = 2) -> list[list[int]]:
    return [[int(item) for item in epoch] for epoch in data.epochs(num_epochs)]


@pytest.mark.parametrize("name", ITERABLES)
def test_iterables_continue_by_count(name: str) -> None:
    made = worlds(2)
    ranks = [tutti.shard(ITERABLES[name](), world=world) for world in made]
    for world, data in zip(made, ranks, strict=True):
        for _ in zip(range(4), data, strict=False):
            step(world)
    state = state_of(ranks)
    parts = []
    for world in worlds(3):
        data = tutti.shard(ITERABLES[name](), world=world)
        data.load_state_dict(state)
        parts.append(items_of(data))
    first = [item for part in parts for item in part[0]]
    # 12 items are left for 3 ranks: none has to repeat one.
    assert sorted(first) == list(range(8, NUM_SAMPLES))
    assert {item for part in parts for item in part[1]} == set(range(NUM_SAMPLES))


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_an_iterable_with_a_state_is_not_read_again(num_ranks: int, accumulates: bool) -> None:
    made = worlds(2)
    ranks = [tutti.shard(Resumable(), world=world) for world in made]
    loops = [iter(data) for data in ranks]
    for _ in range(5):
        for loop in loops:
            next(loop)
        step(*made)
    if accumulates:  # The state is beyond what is committed: the last one that was taken is used.
        state_of(ranks)
        for loop in loops:
            next(loop)
    state = state_of(ranks)
    parts = []
    for world in worlds(num_ranks):
        source = Resumable()
        data = tutti.shard(source, world=world)
        data.load_state_dict(state)
        assert state_of([data])["places"] == state["places"] or num_ranks != 1
        parts.append(items_of(data, 1)[0])
        assert source.num_read == NUM_SAMPLES - 10
    used = Counter(item for part in parts for item in part)
    assert set(used) == set(range(10, NUM_SAMPLES))


# --- torchdata's StatefulDataLoader ---


OLD_CALLS = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
"""torchdata calls what torch no longer wants."""


class Shuffles(IterableDataset[int]):
    """A dataset with a state of its own, which goes from epoch to epoch."""

    def __init__(self) -> None:
        self.epoch, self.place, self.num_read = -1, 0, 0
        self._continues = False

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.place, self._continues = state["epoch"], state["place"], True

    def __iter__(self) -> Iterator[int]:
        if not self._continues:
            self.epoch, self.place = self.epoch + 1, 0
        self._continues = False
        order = random.Random(self.epoch).sample(range(NUM_SAMPLES), NUM_SAMPLES)
        while self.place < NUM_SAMPLES:
            self.place += 1
            self.num_read += 1
            yield order[self.place - 1]


@OLD_CALLS
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("num_done", [0, 1])
def test_a_stateful_loader_of_an_iterable_dataset_continues_from_its_own_state(num_done: int, num_workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def make(world: World) -> tuple[Shuffles, Any]:
        dataset = Shuffles()
        return dataset, tutti.shard(stateful(dataset, batch_size=2, num_workers=num_workers), world=world)

    def batches_of(data: Any) -> list[list[list[int]]]:
        return [[batch.tolist() for batch in epoch] for epoch in data.epochs(3)]

    undisturbed = [batches_of(make(world)[1]) for world in worlds(2)]
    made = worlds(2)
    ranks = [make(world)[1] for world in made]
    loops = [_stepping(data, world) for data, world in zip(ranks, made, strict=True)]
    for _ in range(num_done * 5 + 2):
        for loop in loops:
            next(loop)
    state = state_of(ranks)
    for rank, world in enumerate(worlds(2)):
        dataset, data = make(world)
        data.load_state_dict(state)
        assert batches_of(data) == [undisturbed[rank][num_done][2:], *undisturbed[rank][num_done + 1 :]]
        if not num_workers:
            assert dataset.num_read <= NUM_SAMPLES * (3 - num_done) - 2 * 2 * 1
    # Every rank reads the same data, so another number of ranks may continue too.
    dataset, data = make(worlds(1)[0])
    data.load_state_dict(state)
    left = [batch for rank in undisturbed for batch in rank[num_done][2:]]
    assert sorted(batches_of(data)[0]) == sorted(left)


def _stepping(data: Any, world: World) -> Iterator[None]:
    for epoch in data.epochs(3):
        for _ in epoch:
            step(world)
            yield


@OLD_CALLS
def test_a_stateful_loader_of_a_map_style_dataset_is_divided_as_any() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    made = worlds(2)
    ranks = [tutti.shard(stateful(numbers(), 2, shuffle=True), world=world) for world in made]
    plain = [tutti.shard(DataLoader(numbers(), 2, shuffle=True), world=world) for world in worlds(2)]
    assert [epochs_of(data) for data in ranks] == [epochs_of(data) for data in plain]
