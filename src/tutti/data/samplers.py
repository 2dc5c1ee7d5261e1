"""Samplers that divide data between ranks themselves: torch's own is replaced, others are refused.

`shard` divides what a loader's sampler gives. If the sampler has divided the data before, each rank would train on a
part of a part, and most samples would never be seen.
"""

import logging
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

from tutti.errors import ConfigError
from tutti.world import World

_log = logging.getLogger("tutti")


def shuffled(num_samples: int, seed: int, epoch: int) -> list[int]:
    """Return the order of an epoch's samples, the same on every rank."""
    # The multiplier keeps epochs of neighbouring seeds apart: seed 0, epoch 1 is not seed 1, epoch 0.
    generator = torch.Generator("cpu").manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(num_samples, generator=generator, device="cpu").tolist()


class AllRanksSampler(Sampler[int]):
    """The samples that a `DistributedSampler` gives all ranks together, in the order of its seed and the epoch."""

    def __init__(self, divided: DistributedSampler[Any], seed: int, num_ranks: int) -> None:
        """Replace `divided`; `seed` is added to its own."""
        self._num_samples = len(divided.dataset)  # type: ignore[arg-type]
        self._drop_last = divided.drop_last
        self.shuffle = divided.shuffle
        """Whether every epoch has a random order."""
        self.seed = divided.seed + seed
        """Of the random orders."""
        self.epoch = divided.epoch
        """The epoch that is drawn next."""
        self.num_ranks = num_ranks
        """Number of ranks: with `drop_last`, all of them get as many samples."""

    def __iter__(self) -> Iterator[int]:
        order = shuffled(self._num_samples, self.seed, self.epoch) if self.shuffle else range(self._num_samples)
        return iter(order[: len(self)])

    def __len__(self) -> int:
        return self._num_samples - (self._num_samples % self.num_ranks if self._drop_last else 0)


def undivided(loader: DataLoader[Any], seed: int, world: World) -> AllRanksSampler | None:
    """Return the sampler that replaces torch's `DistributedSampler` in a loader; None if the loader has none.

    Raises `ConfigError` if it has another sampler that divides the data between ranks.
    """
    batches, sampler = loader.batch_sampler, loader.sampler
    assert batches is not None
    # DataLoader(batch_sampler=BatchSampler(sampler, ...)) has its sampler in there.
    if isinstance(batches, BatchSampler) and is_torchs(batches):
        sampler = batches.sampler
        if isinstance(sampler, DistributedSampler) and is_torchs(sampler):
            if sampler.num_replicas > 1 and world.rank == 0:
                _log.warning(
                    "shard: the DataLoader has a DistributedSampler. tutti.shard divides the data itself, so its order "
                    "over all %d ranks is used instead (same shuffle, seed and drop_last); it can be left out.",
                    sampler.num_replicas,
                )
            return AllRanksSampler(sampler, seed, world.size)
    num_samples = len(loader.dataset)  # type: ignore[arg-type]
    for each in (sampler, batches):
        _refuse_divided(each, num_samples, world, is_of_samples=each is sampler)
    return None


def _refuse_divided(sampler: Any, num_samples: int, world: World, is_of_samples: bool) -> None:
    """Raise `ConfigError` for a sampler that gives each rank another part of the data."""
    if getattr(sampler, "same_on_every_rank", False):
        return
    found = ""
    if getattr(sampler, "num_replicas", 1) != 1 and hasattr(sampler, "rank"):
        found = f"for rank {sampler.rank} of {sampler.num_replicas}"
    elif is_of_samples and not is_torchs(sampler) and isinstance(sampler, Sized):
        # About one part in `size`: that is hardly a coincidence for a sampler of the user's own.
        part = {num_samples // world.size, -(-num_samples // world.size)}
        if len(sampler) in part and world.size > 1:
            found = f"{len(sampler)} of {num_samples} samples, one part for each of {world.size} ranks"
    if found:
        raise ConfigError(
            f"shard: {type(sampler).__name__} divides the data itself ({found}), so that most samples would never be "
            "used. Give the DataLoader a sampler of all samples, or do not pass it to tutti.shard. If the sampler "
            "gives the same samples on every rank, set same_on_every_rank = True on it."
        )


def is_torchs(sampler: Any) -> bool:
    """Whether a sampler is one of torch, or what torchdata's StatefulDataLoader puts in the place of one."""
    return type(sampler).__module__.startswith(("torch.utils.data", "torchdata."))
