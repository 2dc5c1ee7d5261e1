"""`shard`: every sample exactly once per epoch over all ranks, and all ranks in step."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

import tutti
from support import TRANSPORTS, run_ok
from tutti.data.division import Remainder, batches_of_rank, divide_batches, divide_steps, form_steps, num_steps
from tutti.errors import ConfigError
from tutti.transports import SingleRankTransport
from tutti.world import World


def worlds(size: int) -> list[World]:
    """Every rank's world, for data whose order each rank works out by itself."""
    return [World(rank, size, rank, "host", SingleRankTransport()) for rank in range(size)]


def numbers(num_samples: int) -> TensorDataset:
    return TensorDataset(torch.arange(num_samples))


def epoch_of(sharded: Iterable[Any]) -> list[list[int]]:
    """One epoch's batches of sample numbers, or of single samples."""
    return [torch.as_tensor(item[0]).reshape(-1).tolist() for item in sharded]


def on_all_ranks(make: Any, size: int, **options: Any) -> list[Any]:
    return [tutti.shard(make(), world=world, **options) for world in worlds(size)]


def flat(nest: Iterable[Iterable[Any]]) -> list[Any]:
    return [item for part in nest for item in part]


@pytest.fixture
def model() -> nn.Module:
    """For `world.sample_counts.distributed`: what is drawn while it is there and trains is taken to be trained on."""
    return nn.Linear(1, 1)


# --- divide_batches ---


@st.composite
def divided(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    """Batches of any sizes, and a number of ranks for which there are enough samples."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=25))
    num_ranks = draw(st.integers(1, min(8, sum(sizes))))
    indices = iter(draw(st.permutations(range(sum(sizes)))))
    return [[next(indices) for _ in range(size)] for size in sizes], num_ranks


@given(divided())
def test_deal_gives_every_index_to_one_rank(case: tuple[list[list[int]], int]) -> None:
    batches, num_ranks = case
    assert Counter(flat(flat(divide_batches(batches, num_ranks)))) == Counter(flat(batches))


@given(divided())
def test_deal_keeps_ranks_in_step(case: tuple[list[list[int]], int]) -> None:
    batches, num_ranks = case
    shares = divide_batches(batches, num_ranks)
    steps = form_steps(batches, num_ranks, Remainder.SPLIT)
    for other in range(1, 5):
        assert [batches_of_rank(steps, other, rank) for rank in range(other)] == divide_steps(steps, other)
    assert len(shares) == num_ranks
    assert len({len(share) for share in shares}) == 1
    assert all(batch for share in shares for batch in share)


@given(divided())
def test_deal_changes_the_last_step_only(case: tuple[list[list[int]], int]) -> None:
    """Each run of `num_ranks` batches is a step as it is; what is left over is split evenly."""
    batches, num_ranks = case
    steps = list(zip(*divide_batches(batches, num_ranks), strict=True))
    num_kept = len(steps) if len(batches) % num_ranks == 0 else len(steps) - 1
    assert [list(step) for step in steps[:num_kept]] == [
        batches[start : start + num_ranks] for start in range(0, num_kept * num_ranks, num_ranks)
    ]
    for step in steps[num_kept:]:
        assert flat(step) == flat(batches[num_kept * num_ranks :])
        sizes = [len(batch) for batch in step]
        assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 7), st.integers(1, 12))
def test_deal_refuses_fewer_samples_than_ranks(num_samples: int, more: int) -> None:
    wanted = f"{num_samples} samples cannot be divided between {num_samples + more} ranks.*fewer workers, or more data"
    with pytest.raises(ConfigError, match=wanted):
        divide_batches([[index] for index in range(num_samples)], num_samples + more)


@given(st.integers(1, 80), st.integers(1, 6), st.booleans(), st.integers(1, 6))
def test_the_number_of_steps_is_known_without_the_batches(
    num_samples: int, batch_size: int, drop_last: bool, num_ranks: int
) -> None:
    num_kept = num_samples - (num_samples % batch_size if drop_last else 0)
    batches = [list(range(start, min(start + batch_size, num_samples))) for start in range(0, num_kept, batch_size)]
    remainder = Remainder.DROP if drop_last else Remainder.SPLIT
    if not drop_last and num_samples < num_ranks:
        with pytest.raises(ConfigError, match="cannot be divided"):
            num_steps(num_samples, batch_size, drop_last, num_ranks)
    else:
        wanted = len(form_steps(batches, num_ranks, remainder))
        assert num_steps(num_samples, batch_size, drop_last, num_ranks) == wanted


def test_deal_examples() -> None:
    assert divide_batches([[0, 1], [2, 3], [4, 5], [6]], 2) == [[[0, 1], [4, 5]], [[2, 3], [6]]]
    assert divide_batches([[0, 1], [2, 3], [4, 5]], 2) == [[[0, 1], [4]], [[2, 3], [5]]], "a batch left over is split"
    assert divide_batches([[0, 1], [2, 3], [4]], 2) == [[[0, 1, 2]], [[3, 4]]], (
        "one sample left over joins the step before"
    )


# --- DataLoader ---


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("num_samples", [5, 24, 25, 31])
def test_loader_gives_every_sample_once_per_epoch(num_samples: int, size: int, shuffle: bool) -> None:
    loaders = on_all_ranks(lambda: DataLoader(numbers(num_samples), batch_size=4, shuffle=shuffle), size)
    for _ in range(2):
        epochs = [epoch_of(loader) for loader in loaders]
        assert sorted(flat(flat(epochs))) == list(range(num_samples))
        assert [len(epoch) for epoch in epochs] == [len(loader) for loader in loaders]
        assert len({len(epoch) for epoch in epochs}) == 1


def test_loader_keeps_the_batch_size_per_rank() -> None:
    loaders = on_all_ranks(lambda: DataLoader(numbers(48), batch_size=4, shuffle=True), 3)
    assert [[len(batch) for batch in epoch_of(loader)] for loader in loaders] == [[4] * 4] * 3


def test_sequential_loader_keeps_its_order() -> None:
    first, second = on_all_ranks(lambda: DataLoader(numbers(8), batch_size=2), 2)
    assert epoch_of(first) == epoch_of(first) == [[0, 1], [4, 5]]
    assert epoch_of(second) == [[2, 3], [6, 7]]


def test_shuffled_loader_is_reshuffled_every_epoch() -> None:
    loader = on_all_ranks(lambda: DataLoader(numbers(64), batch_size=4, shuffle=True), 2)[0]
    epochs = [flat(epoch_of(loader)) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert any(epoch != sorted(epoch) for epoch in epochs)


def test_seed_decides_the_order() -> None:
    def order(seed: int) -> list[list[int]]:
        torch.manual_seed(torch.seed())  # Whatever else is random plays no part.
        loader = DataLoader(numbers(64), batch_size=4, shuffle=True)
        return epoch_of(tutti.shard(loader, seed=seed, world=worlds(2)[1]))

    assert order(3) == order(3)
    assert order(3) != order(4)


@pytest.mark.parametrize("kind", ["loader", "dataset"])
def test_set_epoch_goes_to_that_epochs_order(kind: str) -> None:
    def make() -> Any:
        data = numbers(40)
        return tutti.shard(DataLoader(data, batch_size=4, shuffle=True) if kind == "loader" else data, world=world)

    world = worlds(2)[0]
    whole_run = make()
    epochs = [epoch_of(whole_run) for _ in range(3)]
    resumed = make()
    resumed.set_epoch(2)
    assert epoch_of(resumed) == epochs[2]
    resumed.set_epoch(0)
    assert [epoch_of(resumed), epoch_of(resumed)] == epochs[:2]


def test_two_iterators_at_once_do_not_disturb_each_other() -> None:
    loaders = on_all_ranks(lambda: DataLoader(numbers(16), batch_size=2, shuffle=True), 2)
    pairs = [list(zip(loader, loader, strict=True)) for loader in loaders]
    for turn in (0, 1):
        assert sorted(flat(flat(epoch_of(pair[turn] for pair in of_rank) for of_rank in pairs))) == list(range(16))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("num_samples", [12, 14, 23])
def test_drop_last_is_honoured(num_samples: int, size: int) -> None:
    """All batches have the size asked for, on all ranks; samples that would not fill a step are left out."""
    loaders = on_all_ranks(lambda: DataLoader(numbers(num_samples), batch_size=4, drop_last=True), size)
    batches = [epoch_of(loader) for loader in loaders]
    num_steps = num_samples // (4 * size)
    assert [[len(batch) for batch in of_rank] for of_rank in batches] == [[4] * num_steps] * size
    assert sorted(flat(flat(batches))) == list(range(num_steps * size * 4))
    assert [len(loader) for loader in loaders] == [num_steps] * size


class FromWorker(Dataset[tuple[Tensor, int]]):
    """Samples that say which DataLoader worker made them; -1: none."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        info = get_worker_info()
        return torch.tensor(index), -1 if info is None else info.id


@pytest.mark.parametrize("persistent", [False, True])
def test_loaders_own_workers_are_kept(persistent: bool) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(FromWorker(), batch_size=2, num_workers=1, persistent_workers=persistent, shuffle=True)

    loaders = on_all_ranks(make, 2)
    for _ in range(2):
        batches = flat(loaders)
        assert sorted(flat(x.tolist() for x, _ in batches)) == list(range(10))
        assert set(flat(workers.tolist() for _, workers in batches)) == {0}


def as_dict(samples: list[Any]) -> dict[str, Any]:
    return {"x": torch.stack([sample[0] for sample in samples]), "count": len(samples)}


def test_collation_is_kept() -> None:
    for loader in on_all_ranks(lambda: DataLoader(numbers(8), batch_size=2, collate_fn=as_dict), 2):
        assert [(sorted(batch), batch["count"]) for batch in loader] == [(["count", "x"], 2)] * 2


def test_pinning_is_kept() -> None:
    loader = on_all_ranks(lambda: DataLoader(numbers(8), batch_size=2, pin_memory=True), 2)[0]
    if torch.accelerator.is_available():
        assert all(batch[0].is_pinned() for batch in loader)
    else:  # torch then says that it was asked to.
        with pytest.warns(UserWarning, match="pin_memory"):
            list(loader)


@pytest.mark.parametrize("num_samples", [1, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_loader_with_fewer_samples_than_ranks(num_samples: int, shuffle: bool) -> None:
    for world in worlds(3):
        with pytest.raises(ConfigError, match=f"{num_samples} samples cannot be divided between 3 ranks"):
            tutti.shard(DataLoader(numbers(num_samples), batch_size=4, shuffle=shuffle), world=world)


def test_loader_without_batches_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size=None cannot be divided between ranks; give it a batch_size"):
        tutti.shard(DataLoader(numbers(8), batch_size=None), world=worlds(2)[0])


# --- samplers of the user's own: rank 0's draw holds for all ---


class Grouped(Sampler[list[int]]):
    """A batch sampler of uneven batches in an order that differs between ranks and epochs."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self.sizes = list(sizes)

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(torch.randperm(sum(self.sizes)).tolist())
        return iter([[next(indices) for _ in range(size)] for size in self.sizes])

    def __len__(self) -> int:
        return len(self.sizes)


SAMPLERS = {
    "weighted": lambda: DataLoader(numbers(20), batch_size=4, sampler=WeightedRandomSampler([1.0] * 20, 16)),
    "replacement": lambda: DataLoader(numbers(20), batch_size=4, sampler=RandomSampler(numbers(20), replacement=True)),
    "subset": lambda: DataLoader(numbers(20), batch_size=3, sampler=SubsetRandomSampler(range(5, 20))),
    "last batch of one": lambda: DataLoader(numbers(20), batch_size=3, sampler=SubsetRandomSampler(range(13))),
    "batches": lambda: DataLoader(numbers(20), batch_sampler=Grouped([5, 1, 4, 3, 2, 5])),
    "odd number of batches": lambda: DataLoader(numbers(20), batch_sampler=Grouped([4] * 5)),
    "batch sampler of torch": lambda: DataLoader(
        numbers(20), batch_sampler=BatchSampler(RandomSampler(range(20)), 4, drop_last=False)
    ),
    "first samples in order": lambda: DataLoader(numbers(20), batch_size=4, sampler=SequentialSampler(range(11))),
    "first samples shuffled": lambda: DataLoader(numbers(20), batch_size=4, sampler=RandomSampler(range(11))),
}

WITHOUT_REPEATS = {
    "subset": range(5, 20),
    "last batch of one": range(13),
    "batches": range(20),
    "odd number of batches": range(20),
    "batch sampler of torch": range(20),
    "first samples in order": range(11),
    "first samples shuffled": range(11),
}


def _two_epochs(world: World, name: str) -> tuple[int, list[list[list[int]]], list[list[int]]]:
    loader = tutti.shard(SAMPLERS[name](), world=world)
    seen: list[list[list[int]]] = []
    counted: list[list[int]] = []
    for _ in range(2):
        seen.append([])
        counted.append([])
        for (batch,) in loader:
            seen[-1].append(batch.tolist())
            counted[-1].append(world.sample_counts.num_samples)
    return len(loader), seen, counted


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", SAMPLERS)
def test_own_sampler_agrees_over_ranks(name: str, size: int) -> None:
    results = run_ok(_two_epochs, name, size=size, transport="sockets")
    for epoch in (0, 1):
        batches = [seen[epoch] for _, seen, _ in results]
        assert len({len(of_rank) for of_rank in batches}) == 1, "all ranks take as many steps"
        assert [counted[epoch] for _, _, counted in results] == [
            [len(batch) for batch in of_rank] for of_rank in batches
        ], "the weight of a batch is its size"
        if name in WITHOUT_REPEATS:
            assert sorted(flat(flat(batches))) == list(WITHOUT_REPEATS[name])
    if name != "first samples in order":
        assert results[0][1][0] != results[0][1][1], "each epoch is a draw of its own"


@pytest.mark.parametrize("name", SAMPLERS)
def test_length_with_own_sampler_is_the_number_of_batches(name: str) -> None:
    for length, seen, _ in run_ok(_two_epochs, name, size=2, transport="sockets"):
        assert length == len(seen[0])


def test_fewer_batches_of_own_sampler_than_ranks() -> None:
    """Two batches of four samples are enough for three ranks: the pool is split."""
    results = run_ok(_few_batches, size=3, transport="sockets")
    assert sorted(flat(flat(results))) == list(range(8))
    assert [len(of_rank) for of_rank in results] == [1, 1, 1]


def _few_batches(world: World) -> list[list[int]]:
    return epoch_of(tutti.shard(DataLoader(numbers(8), batch_sampler=Grouped([4, 4])), world=world))


# --- map-style datasets ---


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("num_samples", [6, 7])
def test_dataset_gives_every_sample_once_per_epoch(num_samples: int, size: int) -> None:
    shards = on_all_ranks(lambda: numbers(num_samples), size)
    epochs = []
    for _ in range(2):
        parts = [flat(epoch_of(part)) for part in shards]
        assert sorted(flat(parts)) == list(range(num_samples))
        assert [len(part) for part in parts] == [len(shard) for shard in shards]
        epochs.append(parts)
    assert epochs[0] != epochs[1], "reshuffled"


def test_seed_decides_a_datasets_order() -> None:
    def order(seed: int) -> list[list[int]]:
        return epoch_of(tutti.shard(numbers(40), seed=seed, world=worlds(2)[0]))

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_length_of_a_dataset_in_training_counts_the_echo(model: nn.Module) -> None:
    """A schedule made from the length must fit the number of steps, which is the same on every rank."""
    for world in worlds(2):
        world.sample_counts.distributed.add(model)
        sharded = tutti.shard(numbers(7), world=world)
        assert len(sharded) == len(list(sharded)) == 4


# --- iterables ---


class Stream(IterableDataset[int]):
    """An iterable dataset that does not know its length."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_samples))


class SizedStream(Stream):
    """One that does."""

    def __len__(self) -> int:
        return self.num_samples


ITERABLES = {
    "generator": lambda n: (number for number in range(n)),
    "iterator": lambda n: iter(range(n)),
    "set": lambda n: set(range(n)),
    "iterable dataset": Stream,
    "iterable dataset with a length": SizedStream,
    "loader of an iterable dataset": lambda n: DataLoader(Stream(n), batch_size=1),
    "loader of one with a length": lambda n: DataLoader(SizedStream(n), batch_size=1),
    "loader of one, unbatched": lambda n: DataLoader(SizedStream(n), batch_size=None),
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", ITERABLES)
def test_items_of_an_iterable_go_to_ranks_in_turn(kind: str, size: int) -> None:
    for rank, sharded in enumerate(on_all_ranks(lambda: ITERABLES[kind](7), size)):
        assert [int(item) for item in sharded] == list(range(rank, 7, size))


@pytest.mark.parametrize("kind", ITERABLES)
def test_empty_iterable(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"data is empty.*Look at its path"):
        list(tutti.shard(ITERABLES[kind](0), world=worlds(2)[1]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: numbers(0),
        lambda: [],
        lambda: DataLoader(numbers(0), batch_size=4),
        lambda: DataLoader(numbers(3), batch_size=4, drop_last=True),
    ],
    ids=["dataset", "list", "loader", "loader that drops all"],
)
def test_empty_data_is_refused_at_once(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"data is empty.*Look at its path"):
        tutti.shard(make(), world=worlds(2)[0])


def test_generator_serves_one_epoch() -> None:
    """The second would train on nothing: that is said."""
    sharded = tutti.shard((number for number in range(4)), world=worlds(2)[0])
    assert list(sharded) == [0, 2]
    with pytest.raises(ConfigError, match="empty"):
        list(sharded)


def test_neither_dataset_nor_iterable() -> None:
    with pytest.raises(ConfigError, match="a dataset, a DataLoader or an iterable, got a int"):
        tutti.shard(3, world=worlds(2)[0])  # type: ignore[arg-type]


def test_without_a_world() -> None:
    with pytest.raises(ConfigError, match=r"call tutti\.init\(\) first"):
        tutti.shard(numbers(4))


# --- counting ---


def test_draws_count_batches_and_their_samples() -> None:
    for world in worlds(2):
        loader = tutti.shard(DataLoader(numbers(11), batch_size=2), world=world)
        counts = [(world.sample_counts.num_batches, world.sample_counts.num_samples, len(batch)) for (batch,) in loader]
        assert [number for number, _, _ in counts] == [1, 2, 3]
        assert [samples for _, samples, _ in counts] == [batch for _, _, batch in counts]


@pytest.mark.parametrize(
    ("item", "num_samples"),
    [
        (torch.zeros(5, 2), 5),
        ((torch.zeros(3, 2), torch.zeros(3)), 3),
        ({"x": "text", "y": [torch.zeros(4)]}, 4),
        (torch.tensor(1.0), 1),
        ("text", 1),
    ],
    ids=["tensor", "tuple", "dict", "scalar", "no tensor"],
)
def test_draws_count_rows_of_an_item(item: Any, num_samples: int) -> None:
    world = worlds(2)[0]
    next(iter(tutti.shard(iter([item, item]), world=world)))
    assert (world.sample_counts.num_batches, world.sample_counts.num_samples) == (1, num_samples)


def test_early_batches_are_not_counted() -> None:
    """A batch counts when the training loop takes it, not when a worker prefetches it."""
    world = worlds(2)[0]
    batches = iter(tutti.shard(DataLoader(numbers(16), batch_size=2, num_workers=1), world=world))
    next(batches)
    assert world.sample_counts.num_batches == 1


# --- the echo: a rank that runs out early stays in step, and changes nothing ---

LINEAR = (5, 3)


def batches_of_uneven_sizes() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    sizes = [4, 1, 6, 3, 5, 2, 8]
    return [
        (
            torch.randn(size, LINEAR[0], generator=generator, dtype=torch.float64),
            torch.randn(size, LINEAR[1], generator=generator, dtype=torch.float64),
        )
        for size in sizes
    ]


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(LINEAR[0], 4), nn.Tanh(), nn.Linear(4, LINEAR[1])).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def train_plainly(size: int, num_epochs: int) -> list[Tensor]:
    """On one process, with the batches that the group holds at each step put together."""
    model, optimizer = make_model()
    batches = batches_of_uneven_sizes()
    for _ in range(num_epochs):
        for start in range(0, len(batches), size):
            xs, ys = zip(*batches[start : start + size], strict=True)
            step(model, optimizer, torch.cat(xs), torch.cat(ys))
    return [parameter.detach() for parameter in model.parameters()]


def _train_on_iterable(world: World, num_epochs: int) -> tuple[int, list[Tensor]]:
    model, optimizer = make_model()
    num_steps = 0
    with tutti.distribute(model, optimizer, world=world):
        for _ in range(num_epochs):
            for x, y in tutti.shard(iter(batches_of_uneven_sizes()), world=world):
                step(model, optimizer, x, y)
                num_steps += 1
    return num_steps, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("size", "num_steps"), [(2, 8), (3, 6)])
def test_echo_keeps_ranks_in_step_and_changes_nothing(size: int, num_steps: int, transport: str) -> None:
    results = run_ok(_train_on_iterable, 2, size=size, transport=transport)
    assert [steps for steps, _ in results] == [num_steps] * size
    for _, parameters in results:
        assert all(torch.equal(*pair) for pair in zip(parameters, results[0][1], strict=True))
    for mine, plain in zip(results[0][1], train_plainly(size, 2), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-10, atol=1e-12)


def test_echo_weighs_nothing(model: nn.Module) -> None:
    """Rank 1 of 2 holds three of seven items, and the last of them once more with weight 0."""
    world = worlds(2)[1]
    world.sample_counts.distributed.add(model)
    batches = batches_of_uneven_sizes()
    weights = []
    for x, _ in tutti.shard(iter(batches), world=world):
        weights.append((len(x), world.sample_counts.num_samples))
    assert weights == [(1, 1), (3, 3), (2, 2), (2, 0)]


def test_no_echo_where_all_ranks_have_as_many(model: nn.Module) -> None:
    for world in worlds(3):
        world.sample_counts.distributed.add(model)
        assert list(tutti.shard(iter(range(6)), world=world)) == [world.rank, world.rank + 3]


@pytest.mark.parametrize("where", ["no job", "no_grad", "eval"])
@pytest.mark.parametrize("kind", ["iterable", "dataset"])
def test_no_echo_outside_training(where: str, kind: str, model: nn.Module) -> None:
    """A sample seen twice would make a test accuracy wrong."""
    seen = []
    for world in worlds(3):
        if where != "no job":
            world.sample_counts.distributed.add(model.train(where != "eval"))
        data = iter(range(7)) if kind == "iterable" else list(range(7))
        with torch.set_grad_enabled(where != "no_grad"):
            seen += list(tutti.shard(data, world=world))
    assert sorted(seen) == list(range(7))


def _evaluate_after_training(world: World) -> list[int]:
    model, optimizer = make_model()
    with tutti.distribute(model, optimizer, world=world):
        for x, y in tutti.shard(iter(batches_of_uneven_sizes()), world=world):
            step(model, optimizer, x, y)
        with torch.no_grad():
            inside = list(tutti.shard(iter(range(7)), world=world))
    return inside + list(tutti.shard(iter(range(7, 14)), world=world))  # The job is over: nobody trains.


def test_no_echo_in_evaluation_of_a_distributed_model() -> None:
    results = run_ok(_evaluate_after_training, size=2, transport="sockets")
    assert sorted(flat(results)) == list(range(14))


@pytest.mark.parametrize("kind", ["iterable", "dataset"])
def test_training_on_fewer_items_than_ranks_is_refused(kind: str, model: nn.Module) -> None:
    """A rank without a single item has nothing to echo; it would leave the others waiting."""
    world = worlds(3)[2]
    world.sample_counts.distributed.add(model)
    data = iter(range(2)) if kind == "iterable" else numbers(2)
    with pytest.raises(ConfigError, match=r"2 .*cannot be divided between 3 ranks"):
        list(tutti.shard(data, world=world))
