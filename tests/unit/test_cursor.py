"""The committed position of sharded data: which batches of a training loop a run that continues gets again."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import tutti
from one_thread import state_of, step, worlds
from tutti.data.stages import Stage, not_used, num_left_over
from tutti.errors import ConfigError
from tutti.world import World

NUM_BATCHES = 6


def loader(num_samples: int = 2 * NUM_BATCHES, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(num_samples)), **{"batch_size": 2, "shuffle": True, **options})


def made(world: World, **options: Any) -> Any:
    return tutti.shard(loader(**options), world=world)


def position(data: Any) -> list[int]:
    return state_of([data])["positions"][0]


def taken(batches: Iterator[Any], number: int) -> list[list[int]]:
    return [next(batches)[0].tolist() for _ in range(number)]


def rest(data: Any, num_epochs: int) -> list[list[list[int]]]:
    """What is left, epoch by epoch."""
    return [[batch[0].tolist() for batch in epoch] for epoch in data.epochs(num_epochs)]


def resumed(data: Any, num_epochs: int = 3) -> list[list[list[int]]]:
    """What a run gets that continues where `data` is."""
    state = state_of([data])
    other = made(worlds(1)[0])
    other.load_state_dict(state)
    return rest(other, num_epochs)


@pytest.fixture
def world() -> World:
    """One rank, with a model that trains."""
    return worlds(1)[0]


@pytest.fixture
def whole() -> list[list[list[int]]]:
    """Three epochs of the run that never stops."""
    return rest(made(worlds(1)[0]), 3)


# --- what is committed ---


def test_a_batch_is_committed_by_the_step_after_it(world: World, whole: Any) -> None:
    data = made(world)
    assert position(data) == [0, 0], "before the loop"
    batches = iter(data)
    assert position(data) == [0, 0], "before the first batch"
    assert taken(batches, 1) == whole[0][:1]
    assert position(data) == [0, 0], "before its step"
    assert resumed(data) == whole, "so it comes again"
    step(world)
    assert position(data) == [0, 1]
    taken(batches, 1)
    assert position(data) == [0, 1], "between two steps"
    assert resumed(data) == [whole[0][1:], *whole[1:]]


@pytest.mark.parametrize("persistent", [False, True])
def test_prefetched_batches_are_not_committed(world: World, whole: Any, persistent: bool) -> None:
    data = made(world, num_workers=2, prefetch_factor=3, persistent_workers=persistent)
    batches = iter(data)
    assert taken(batches, 2) == whole[0][:2]
    step(world)
    assert position(data) == [0, 2]
    assert resumed(data) == [whole[0][2:], *whole[1:]]
    other = made(worlds(1)[0], num_workers=2, persistent_workers=persistent)
    other.load_state_dict(state_of([data]))
    assert rest(other, 3) == [whole[0][2:], *whole[1:]], "workers continue too"


def test_batches_of_an_unfinished_accumulation_come_again(world: World, whole: Any) -> None:
    data = made(world)
    batches = iter(data)
    taken(batches, 2)
    step(world)
    taken(batches, 1)
    assert position(data) == [0, 2]
    taken(batches, 1)
    step(world)
    assert position(data) == [0, 4]
    assert resumed(data) == [whole[0][4:], *whole[1:]]


def test_the_end_of_an_epoch(world: World, whole: Any) -> None:
    data = made(world)
    batches = iter(data)
    taken(batches, NUM_BATCHES)
    assert position(data) == [0, 0]
    step(world)
    assert position(data) == [0, NUM_BATCHES], "the loop has not noticed the end"
    assert resumed(data) == [[], *whole[1:]], "what the user does at the end of an epoch is still to do"
    assert next(batches, None) is None
    assert position(data) == [1, 0]
    assert resumed(data) == whole[1:]


def test_accumulation_over_the_end_of_an_epoch(world: World, whole: Any) -> None:
    data = made(world)
    batches = iter(data)
    taken(batches, NUM_BATCHES - 1)
    step(world)
    taken(batches, 1)
    assert next(batches, None) is None
    assert data.epoch == 1
    assert position(data) == [0, NUM_BATCHES - 1], "the last batch is not used yet"
    assert resumed(data) == [whole[0][-1:], *whole[1:]]
    taken(iter(data), 1)
    assert position(data) == [0, NUM_BATCHES - 1]
    step(world)
    assert position(data) == [1, 1]


def test_after_the_last_epoch(world: World) -> None:
    data = made(world)
    for epoch in data.epochs(3):
        for _ in epoch:
            step(world)
    assert position(data) == [3, 0]
    assert resumed(data) == []


def test_a_loop_that_is_left_early(world: World, whole: Any) -> None:
    """A run that continues gets the rest of the epoch; the same run goes on with the next epoch, as without a state."""
    data = made(world)
    for _ in data:
        step(world)
        if position(data) == [0, 3]:
            break
    assert resumed(data) == [whole[0][3:], *whole[1:]]
    taken(iter(data), 1)
    assert position(data) == [1, 0]
    data.set_epoch(2)
    assert resumed(data) == whole[2:]


def test_giving_up_the_rest_of_an_epoch(world: World, whole: Any) -> None:
    data = made(world)
    for _ in data:
        break
    data.set_epoch(data.epoch + 1)
    assert position(data) == [1, 0]
    step(world)
    assert position(data) == [1, 0], "a batch of the epoch that was given up is none of this one"
    assert resumed(data) == whole[1:]


def test_an_evaluation_between_two_steps_changes_nothing(world: World) -> None:
    data, test = made(world), made(world)
    batches = iter(data)
    taken(batches, 1)
    with torch.no_grad():
        assert len(list(test)) == NUM_BATCHES
        test_batches = iter(test)
        taken(test_batches, 2)
    assert position(data) == [0, 0]
    assert position(test) == [1, 2], "nobody trains on it: its batches are used when they are given out"
    step(world)
    assert position(data) == [0, 1]
    assert position(test) == [1, 2]


def test_two_loaders_in_one_loop(world: World) -> None:
    one, other = made(world), made(world, batch_size=3)
    pairs = zip(one, other, strict=False)
    for number in range(3):
        next(pairs)
        assert [position(one), position(other)] == [[0, number], [0, number]]
        step(world)
    assert [position(one), position(other)] == [[0, 3], [0, 3]]


def test_two_loaders_in_turn(world: World) -> None:
    one, other = made(world), made(world)
    ones, others = iter(one), iter(other)
    for number in range(1, 4):
        taken(ones, 1)
        step(world)
        assert [position(one), position(other)] == [[0, number], [0, number - 1]]
        taken(others, 1)
        assert position(other) == [0, number - 1]
        step(world)
        assert position(other) == [0, number]


def test_two_loops_over_one_loader(world: World) -> None:
    """The second is the next epoch, and its position is the loader's."""
    data = made(world)
    first, second = iter(data), iter(data)
    taken(first, 2)
    taken(second, 1)
    step(world)
    assert position(data) == [1, 1]
    taken(first, 1)
    step(world)
    assert position(data) == [1, 1], "what the first gives out is no part of it"
    assert len(list(first)) == NUM_BATCHES - 3
    assert position(data) == [1, 1]


def test_without_a_distributed_model_a_batch_is_used_when_it_is_given_out(whole: Any) -> None:
    data = made(worlds(1, trains=False)[0])
    batches = iter(data)
    assert position(data) == [0, 0]
    taken(batches, 2)
    assert position(data) == [0, 2]
    assert resumed(data) == [whole[0][2:], *whole[1:]]
    list(batches)
    assert position(data) == [1, 0]


def test_a_model_that_is_distributed_in_the_middle_of_an_epoch() -> None:
    world = worlds(1, trains=False)[0]
    data = made(world)
    batches = iter(data)
    taken(batches, 1)
    world.sample_counts.distributed = worlds(1)[0].sample_counts.distributed
    taken(batches, 1)
    assert position(data) == [0, 1]
    with torch.no_grad():
        taken(batches, 1)
    assert position(data) == [0, 1], "in order: the one before it is not committed"
    step(world)
    assert position(data) == [0, 3]


# --- epochs ---


def test_loops_written_for_a_distributed_sampler_continue(world: World) -> None:
    def make() -> Any:
        dataset = TensorDataset(torch.arange(12))
        return tutti.shard(DataLoader(dataset, 2, sampler=DistributedSampler(dataset, 1, 0)), world=world)

    def epochs(data: Any, first: int) -> list[list[list[int]]]:
        seen = []
        for epoch in range(first, 3):
            data.sampler.set_epoch(epoch)
            seen.append([])
            for (batch,) in data:
                step(world)
                seen[-1].append(batch.tolist())
        return seen

    undisturbed = epochs(make(), 0)
    data = make()
    epochs_done = 1
    data.sampler.set_epoch(0)
    assert len(list(data)) == 6
    data.sampler.set_epoch(1)
    for _ in range(1):
        taken(iter(data), 1)
        step(world)
    other = make()
    other.load_state_dict(state_of([data]))
    assert other.epoch == epochs_done
    assert epochs(other, other.epoch) == [undisturbed[1][1:], undisturbed[2]]


def test_epochs_counts_those_of_a_loaded_state(world: World) -> None:
    data = made(world)
    data.set_epoch(2)
    taken(iter(data), 1)
    step(world)
    other = made(worlds(1)[0])
    other.load_state_dict(state_of([data]))
    assert [len(list(epoch)) for epoch in other.epochs(4)] == [NUM_BATCHES - 1, NUM_BATCHES]
    assert list(other.epochs(4)) == []


def test_the_length_is_that_of_a_whole_epoch(world: World) -> None:
    """Also where another number of ranks takes the steps: a schedule is made for the whole run."""
    ranks = [tutti.shard(loader(), world=world) for world in worlds(3)]
    assert {len(data) for data in ranks} == {2}
    data = made(world)
    assert len(data) == NUM_BATCHES
    data.load_state_dict(state_of(ranks))
    assert len(data) == 2


# --- ranks ---


def test_a_lost_ranks_epoch_is_not_begun() -> None:
    ranks = worlds(3)
    data = [made(world) for world in ranks]
    loops = [iter(each) for each in data]
    for loop in loops:
        taken(loop, 1)
    step(*ranks)
    assert state_of(data, lost=[1])["positions"] == [[0, 1], [0, 0], [0, 1]]


def test_ranks_that_hold_one_replica_together_have_one_position() -> None:
    """Two ranks of the transport for each number in the data's world, as `dataclasses.replace(world, ...)` gives."""
    ranks = [world for world in worlds(2) for _ in range(2)]
    data = [made(world) for world in ranks]
    state = state_of(data)
    assert state["positions"] == [[0, 0], [0, 0]]


def test_no_sample_comes_twice_in_an_evaluation() -> None:
    """Three ranks share steps of two samples; where nobody trains, none has to take part with another's sample."""
    state = state_of([made(worlds(1)[0])])
    seen = []
    for world in worlds(3):
        data = made(world)
        data.load_state_dict(state)
        with torch.no_grad():
            seen += [int(number) for (batch,) in data for number in batch]
    assert sorted(seen) == list(range(2 * NUM_BATCHES))


def test_a_distributed_sampler_drops_what_it_dropped_in_the_first_world() -> None:
    def make(world: World) -> Any:
        dataset = TensorDataset(torch.arange(22))
        sampler: Any = DistributedSampler(dataset, world.size, world.rank, drop_last=True)
        return tutti.shard(DataLoader(dataset, 2, sampler=sampler), world=world)

    state = state_of([make(world) for world in worlds(3)])
    seen = []
    for world in worlds(2):
        data = make(world)
        data.load_state_dict(state)
        seen += [int(number) for (batch,) in data for number in batch]
    assert len(seen) == len(set(seen)) == 21


def test_stages_of_earlier_epochs_are_forgotten() -> None:
    data = [tutti.shard(loader(), keep="local", world=world) for world in worlds(2)]
    taken(iter(data[0]), 1)
    world = worlds(1)[0]
    one = tutti.shard(loader(), keep="local", world=world)
    one.load_state_dict(state_of(data))
    assert len(state_of([one])["stages"]) == 1
    for _ in one:
        step(world)
    assert state_of([one])["stages"] == []


def test_left_over_items_from_a_later_one_on() -> None:
    """Reading may begin at any item: the rest is the same."""
    stages = [Stage(3, (1, 1, 1), (2, 0, 1)), Stage(2, (1, 1), (1, 2))]
    everything = list(not_used(range(20), stages, 1))
    for first in range(20):
        assert list(not_used(range(first, 20), stages, 1, first)) == [item for item in everything if item >= first]
        assert num_left_over(first, stages, 1) == sum(item < first for item in everything)
    assert list(not_used(range(20), stages, 0)) == []
    assert list(not_used(range(20), stages, 2)) == list(range(20))


# --- what it costs ---


class Counted(Dataset[int]):
    """Counts the samples that are loaded."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples, self.num_loaded = num_samples, 0

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        self.num_loaded += 1
        return index


@pytest.mark.parametrize("kind", ["loader", "dataset"])
def test_used_samples_are_not_loaded_again(world: World, kind: str) -> None:
    def make() -> tuple[Counted, Any]:
        dataset = Counted(40)
        return dataset, tutti.shard(dataset if kind == "dataset" else DataLoader(dataset, 1), world=world)

    _, data = make()
    batches = iter(data)
    for _ in range(30):
        next(batches)
        step(world)
    dataset, other = make()
    other.load_state_dict(state_of([data]))
    assert len(list(other)) == dataset.num_loaded == 10


def test_a_state_has_a_few_bytes() -> None:
    data = [made(world, num_samples=50_000) for world in worlds(4)]
    for each in data:
        taken(iter(each), 3)
    assert len(json.dumps(state_of(data))) < 500


def test_few_batches_wait_however_long_no_state_is_asked_for(world: World) -> None:
    data = made(world, num_samples=400)
    for _ in data:
        assert len(data._cursor.committed._pending) <= 2
        step(world)


# --- a continued run has the random numbers of the undisturbed one ---


class Noise(torch.utils.data.IterableDataset[int]):
    """Numbers, from which a DataLoader makes batches."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


@pytest.mark.parametrize("kind", ["loader", "iterable", "generator"])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_continued_epoch_draws_nothing_from_torchs_generator(kind: str, steps: int) -> None:
    def make(world: World) -> Any:
        if kind == "iterable":
            return tutti.shard(DataLoader(Noise(), batch_size=2), world=world)
        generator = torch.Generator().manual_seed(5) if kind == "generator" else None
        return tutti.shard(loader(generator=generator), world=world)

    def train(data: Any, world: World, num_steps: int) -> list[float]:
        numbers = []
        for epoch in data.epochs(2):
            for _ in epoch:
                numbers.append(float(torch.rand(())))  # As dropout would.
                step(world)
                num_steps -= 1
                if num_steps == 0:
                    return numbers
        return numbers

    with torch.random.fork_rng():
        torch.manual_seed(1)
        world = worlds(1)[0]
        undisturbed = train(make(world), world, -1)
        torch.manual_seed(1)
        world = worlds(1)[0]
        data = make(world)
        if steps:
            train(data, world, steps)
        else:
            next(iter(data))  # The epoch has begun, but no step is taken.
        state, random_state = state_of([data]), torch.get_rng_state()
        torch.manual_seed(99)
        world = worlds(1)[0]
        data = make(world)
        data.load_state_dict(state)
        torch.set_rng_state(random_state)
        assert train(data, world, -1) == undisturbed[steps:]


class Seeds(Dataset[int]):
    """The seed of the worker that loads a sample, without its number."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        info = torch.utils.data.get_worker_info()
        return info.seed - info.id


def test_workers_have_the_seed_of_the_epoch_that_they_continue(world: World) -> None:
    def make() -> Any:
        return tutti.shard(DataLoader(Seeds(), batch_size=2, num_workers=1), world=world)

    data = make()
    batches = iter(data)
    seeds = set(next(batches).tolist())
    step(world)
    other = make()
    other.load_state_dict(state_of([data]))
    assert {seed for batch in other for seed in batch.tolist()} == seeds
    assert {seed for batch in other for seed in batch.tolist()} != seeds, "the next epoch has another"


# --- bad input ---

WRONG = {
    "length": (lambda: loader(num_samples=14), "its number of samples was 12, and is 14 now"),
    "batch size": (lambda: loader(batch_size=3), "its batch_size was 2, and is 3 now"),
    "drop_last": (lambda: loader(drop_last=True), "its drop_last was False, and is True now"),
    "order": (lambda: loader(shuffle=False), "its order was shuffled, and is sequential now"),
    "dataset": (lambda: list(range(12)), "its kind was DataLoader, and is dataset now"),
    "iterable": (lambda: iter(range(12)), "its kind was DataLoader, and is iterable now"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_position_in_other_data_is_refused(world: World, name: str) -> None:
    make, words = WRONG[name]
    other = tutti.shard(make(), world=world)
    with pytest.raises(ConfigError, match=rf"saved in other data: .*{words}.*Use the same data, or .*set_epoch"):
        other.load_state_dict(state_of([made(world)]))
    assert other.epoch == 0


def test_a_position_with_another_seed_is_refused(world: World) -> None:
    with pytest.raises(ConfigError, match="its seed was 0, and is 4 now"):
        tutti.shard(loader(), seed=4, world=world).load_state_dict(state_of([made(world)]))


DAMAGE: dict[str, Any] = {
    "no dict": (lambda state: [1], "this is no position in data, but a list"),
    "empty": (lambda state: {}, "this is no position in data: it has no kind, num_parts, positions"),
    "a model's": (lambda state: {"weight": torch.zeros(2)}, "this is no position in data"),
    "no ranks": (lambda state: {**state, "positions": []}, "damaged"),
    "negative": (lambda state: {**state, "positions": [[0, -1]]}, "damaged .*-1 is no number of 0 or more"),
    "text": (lambda state: {**state, "positions": [["0", 0]]}, "damaged .*'0' is no number"),
    "a number": (lambda state: {**state, "positions": 3}, "damaged"),
    "no parts": (lambda state: {**state, "num_parts": 0}, "damaged .*0 is no number of 1 or more"),
    "stages": (lambda state: {**state, "stages": [{"num_parts": 1, "epochs": [0], "steps": []}]}, "damaged"),
    "seeds": (lambda state: {**state, "worker_seeds": [None, None]}, "damaged .*1 ranks have 2 seeds"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_no_position_is_refused(world: World, name: str) -> None:
    damage, words = DAMAGE[name]
    data = made(world)
    with pytest.raises(ConfigError, match=rf"{words}.*Give .*state_dict\(\)"):
        data.load_state_dict(damage(state_of([made(world)])))
    assert position(data) == [0, 0]


def test_keep_is_checked(world: World) -> None:
    with pytest.raises(ConfigError, match='keep must be "global" or "local", got 3'):
        tutti.shard(loader(), keep=3, world=world)  # type: ignore[arg-type]
