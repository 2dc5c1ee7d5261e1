"""Runs that stop anywhere and continue on any number of ranks: every sample once, and the undisturbed run's steps."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Sampler, TensorDataset

import tutti
from one_thread import state_of, step, worlds
from tutti.data import GlobalBatches
from tutti.world import World

NUM_EPOCHS = 3
MAX_RANKS = 5


class Uneven(Sampler[list[int]]):
    """A batch sampler whose order depends on all epochs before."""

    same_on_every_rank = True

    def __init__(self, num_samples: int) -> None:
        self.num_samples, self.generator = num_samples, torch.Generator().manual_seed(1)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.num_samples, generator=self.generator).tolist()
        return iter([order[start : start + start % 3 + 1] for start in self._starts()])

    def _starts(self) -> Iterator[int]:
        start = 0
        while start < self.num_samples:
            yield start
            start += start % 3 + 1

    def __len__(self) -> int:
        return len(list(self._starts()))


class Numbers:
    """An iterable without a length."""

    def __init__(self, num_items: int) -> None:
        self.num_items = num_items

    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        return ((torch.tensor(number),) for number in range(self.num_items))


@dataclass
class Case:
    """Data, and the worlds that train on it one after the other."""

    kind: str
    num_samples: int
    batch_size: int
    drop_last: bool
    shuffle: bool
    keep: str
    sizes: list[int]
    seed: int
    """Of when worlds end."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def shard(self, world: World) -> Any:
        numbers = TensorDataset(torch.arange(self.num_samples))
        if self.kind == "dataset":
            return tutti.shard(numbers, world=world)
        if self.kind == "iterable":
            return tutti.shard(Numbers(self.num_samples), world=world)
        if self.kind == "global":
            parts = GlobalBatches(self.num_samples, MAX_RANKS, world.size, seed=3)
            loader = DataLoader(numbers, batch_sampler=parts)
        elif self.kind == "drawn":
            loader = DataLoader(numbers, batch_sampler=Uneven(self.num_samples))
        else:
            loader = DataLoader(numbers, self.batch_size, self.shuffle, drop_last=self.drop_last)
        return tutti.shard(loader, keep=self.keep, world=world)  # type: ignore[arg-type]


@st.composite
def cases(draw: st.DrawFn, kinds: tuple[str, ...], keeps: tuple[str, ...]) -> Case:
    sizes = draw(st.lists(st.integers(1, MAX_RANKS), min_size=2, max_size=4))
    batch_size, drop_last = draw(st.integers(1, 4)), draw(st.booleans())
    enough = max(MAX_RANKS, max(sizes) * (batch_size if drop_last else 1))
    return Case(
        draw(st.sampled_from(kinds)),
        draw(st.integers(enough, enough + 40)),
        batch_size,
        drop_last,
        draw(st.booleans()),
        draw(st.sampled_from(keeps)),
        sizes,
        draw(st.integers(0, 10**6)),
    )


@dataclass
class Rank:
    """The training loop of one rank."""

    world: World
    data: Any
    waiting: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """Epoch, number of the step in it and samples, of batches whose step is not taken yet."""

    def __post_init__(self) -> None:
        self.loop = self._loop()

    def _loop(self) -> Iterator[tuple[int, int, list[int]]]:
        for epoch in self.data.epochs(NUM_EPOCHS):
            for number, (batch,) in enumerate(epoch):
                counts = self.world.sample_counts.num_samples
                assert batch.numel(), "a batch is never empty"
                yield epoch.epoch, number, batch.reshape(-1).tolist() if counts else []

    def draw(self) -> bool:
        """Get the next batch; False at the end of the last epoch."""
        for item in self.loop:
            self.waiting.append(item)
            return True
        return False

    def step(self) -> list[tuple[int, int, list[int]]]:
        """Take a step, and return what it used."""
        step(self.world)
        used, self.waiting = self.waiting, []
        return used


def started(case: Case, size: int, state: dict[str, Any] | None) -> list[Rank]:
    ranks = [Rank(world, case.shard(world)) for world in worlds(size)]
    for rank in ranks if state is not None else ():
        rank.data.load_state_dict(state)
    return ranks


def synchronous_run(case: Case, num_steps: Callable[[], int | None]) -> list[tuple[int, list[int]]]:
    """The epoch and the samples of every step; each world but the last ends after some steps.

    Half of the worlds end while ranks hold batches whose step is not taken.
    """
    done: list[tuple[int, list[int]]] = []
    state = None
    for number, size in enumerate(case.sizes):
        ranks = started(case, size, state)
        left = num_steps() if number + 1 < len(case.sizes) else None
        while left is None or left > 0:
            drawn = [rank.draw() for rank in ranks]
            assert len(set(drawn)) == 1, "all ranks take the same number of steps"
            if not drawn[0]:
                break
            used = [item for rank in ranks for item in rank.step()]
            assert len({epoch for epoch, _, _ in used}) == 1
            done.append((used[0][0], [sample for _, _, samples in used for sample in samples]))
            left = None if left is None else left - 1
        if case.random.random() < 0.5:
            for rank in ranks:
                rank.draw()
        state = state_of([rank.data for rank in ranks])
    return done


def asynchronous_run(case: Case) -> list[tuple[int, list[int]]]:
    """As `synchronous_run`, but every rank goes at its own speed, and some accumulate gradients of several batches."""
    done: list[tuple[int, list[int]]] = []
    state = None
    for number, size in enumerate(case.sizes):
        ranks = started(case, size, state)
        last = number + 1 == len(case.sizes)
        for rank in ranks:
            for _ in range(10**6 if last else case.random.randrange(30)):
                if not rank.draw():
                    done += [(epoch, samples) for epoch, _, samples in rank.step()]
                    break
                if case.random.random() < 0.7:
                    done += [(epoch, samples) for epoch, _, samples in rank.step()]
        state = state_of([rank.data for rank in ranks])
    return done


def undisturbed(case: Case) -> list[tuple[int, list[int]]]:
    """The steps of a run on the first number of ranks that never stops."""
    alone = replace(case, sizes=case.sizes[:1])
    return synchronous_run(alone, lambda: None)


def samples_of(steps: list[tuple[int, list[int]]], epoch: int) -> Counter[int]:
    return Counter(sample for at, samples in steps if at == epoch for sample in samples)


@settings(max_examples=150)
@given(cases(("loader", "global", "drawn"), ("global",)))
def test_a_resized_run_takes_the_steps_of_the_undisturbed_one(case: Case) -> None:
    steps = synchronous_run(case, lambda: case.random.randrange(25))
    assert [(epoch, sorted(samples)) for epoch, samples in steps] == [
        (epoch, sorted(samples)) for epoch, samples in undisturbed(case)
    ]


@settings(max_examples=150)
@given(cases(("loader", "dataset", "iterable", "global", "drawn"), ("local",)))
def test_a_resized_run_uses_every_sample_once(case: Case) -> None:
    """Also what `drop_last` leaves out is no more than in the undisturbed run, in the epoch in which sizes change."""
    check_every_sample(case, synchronous_run(case, lambda: case.random.randrange(25)))


@settings(max_examples=150)
@given(cases(("loader", "dataset", "iterable", "global", "drawn"), ("global", "local")))
def test_ranks_that_are_apart_use_every_sample_once(case: Case) -> None:
    check_every_sample(case, asynchronous_run(case))


def check_every_sample(case: Case, steps: list[tuple[int, list[int]]]) -> None:
    drops = case.kind == "loader" and case.drop_last
    for epoch in range(NUM_EPOCHS):
        used = samples_of(steps, epoch)
        assert not used or max(used.values()) == 1, "no sample comes twice"
        if not drops:
            assert sorted(used) == list(range(case.num_samples))
        else:
            num_used = {case.num_samples // (size * case.batch_size) * size * case.batch_size for size in case.sizes}
            assert len(used) in num_used


def test_local_batches_have_their_size_again_after_steps_were_split() -> None:
    """Four ranks share the steps of two, with half of the batch size; two others then continue with all of it."""

    def sharded(keep: str, size: int, state: dict[str, Any] | None) -> list[Rank]:
        return started(Case("loader", 40, 4, False, True, keep, [size], 0), size, state)

    ranks = sharded("global", 2, None)
    for _ in range(2):
        for rank in ranks:
            rank.draw()
            rank.step()
        ranks = sharded("global", 4, state_of([rank.data for rank in ranks]))
    state = state_of([rank.data for rank in ranks])
    same_ranks = sharded("local", 4, state)
    assert [[len(samples) for epoch, _, samples in rank.loop if epoch == 0] for rank in same_ranks] == [[4, 2]] * 4
    ranks = sharded("local", 2, state)
    sizes = [[len(samples) for epoch, _, samples in rank.loop if epoch == 0] for rank in ranks]
    assert sizes == [[4, 4, 4], [4, 4, 4]]
