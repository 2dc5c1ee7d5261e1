"""A loader that is divided between ranks already, by its sampler: nothing is lost, or it is refused."""

import logging
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, TensorDataset

import tutti
from tutti.errors import ConfigError
from tutti.transports import SingleRankTransport
from tutti.world import World


def world_of(rank: int, size: int) -> World:
    return World(rank, size, rank, "host", SingleRankTransport())


def data(num_samples: int) -> TensorDataset:
    return TensorDataset(torch.arange(num_samples))


def ddp_loader(rank: int, size: int, num_samples: int = 22, batches: bool = False, **options: Any) -> DataLoader[Any]:
    dataset = data(num_samples)
    sampler = DistributedSampler(dataset, num_replicas=size, rank=rank, **options)
    if batches:
        return DataLoader(dataset, batch_sampler=BatchSampler(sampler, 4, drop_last=False))
    return DataLoader(dataset, batch_size=4, sampler=sampler)


def epoch_of(loader: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in loader]


def epoch_of_all(loaders: list[Any]) -> list[int]:
    return [index for loader in loaders for batch in epoch_of(loader) for index in batch]


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_every_sample_is_used_once_with_a_distributed_sampler(size: int, batches: bool) -> None:
    loaders = [tutti.shard(ddp_loader(r, size, batches=batches), world=world_of(r, size)) for r in range(size)]
    for _ in range(2):
        assert Counter(epoch_of_all(loaders)) == Counter(range(22))
    assert len({len(loader) for loader in loaders}) == 1
    assert len(epoch_of(loaders[0])) == len(loaders[0])


def test_one_line_says_so_on_the_first_rank(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="tutti"):
        for rank in range(2):
            tutti.shard(ddp_loader(rank, 2), world=world_of(rank, 2))
    assert len(caplog.records) == 1
    assert "DistributedSampler" in caplog.text
    assert "it can be left out" in caplog.text


def test_shuffle_seed_and_drop_last_are_kept() -> None:
    in_order = [tutti.shard(ddp_loader(r, 2, shuffle=False), world=world_of(r, 2)) for r in range(2)]
    assert epoch_of(in_order[0])[0] == [0, 1, 2, 3]
    orders = [epoch_of(tutti.shard(ddp_loader(0, 2, seed=seed), world=world_of(0, 2))) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    even = [tutti.shard(ddp_loader(r, 3, drop_last=True), world=world_of(r, 3)) for r in range(3)]
    assert len(set(epoch_of_all(even))) == 21  # The rest of 22 by 3 is left out, as by the sampler.


def test_calls_of_set_epoch_still_set_the_epoch() -> None:
    plain = ddp_loader(0, 2)
    sharded = tutti.shard(plain, world=world_of(0, 2))
    first, second = epoch_of(sharded), epoch_of(sharded)
    assert first != second
    sharded.sampler.set_epoch(0)  # type: ignore[union-attr]
    assert epoch_of(sharded) == first
    plain.sampler.set_epoch(0)  # type: ignore[attr-defined]
    assert epoch_of(sharded) == first
    assert epoch_of(sharded) == second  # It counts on from there.
    assert len(sharded.dataset) == 22  # type: ignore[union-attr]


class Part(Sampler[int]):
    """A part of the data for one rank."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Any:
        return iter(range(self.num_samples))


class OfARank(Part):
    """A sampler that knows its rank, as those of other libraries do."""

    num_replicas, rank = 2, 1


class Subclass(DistributedSampler[Any]):
    """Its order is its own, and unknown."""


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (Part(11), r"Part .*11 of 22 samples, one part for each of 2 ranks"),
        (OfARank(22), r"OfARank .*rank 1 of 2"),
        (Subclass(data(22), 2, 1), r"Subclass .*rank 1 of 2"),
    ],
)
def test_another_sampler_that_divides_is_refused(sampler: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tutti.shard(DataLoader(data(22), batch_size=4, sampler=sampler), world=world_of(0, 2))
    sampler.same_on_every_rank = True
    tutti.shard(DataLoader(data(22), batch_size=4, sampler=sampler), world=world_of(0, 2))


def test_a_batch_sampler_that_divides_is_refused() -> None:
    class Batches(Part):
        num_replicas, rank = 2, 1

    with pytest.raises(ConfigError, match=r"Batches .*rank 1 of 2"):
        tutti.shard(DataLoader(data(22), batch_sampler=Batches(22)), world=world_of(0, 2))
    # The number of batches of a batch sampler says nothing.
    tutti.shard(DataLoader(data(22), batch_sampler=Part(11)), world=world_of(0, 2))  # type: ignore[arg-type]
