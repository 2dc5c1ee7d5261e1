"""Orders of an epoch: the batches of all ranks, which `division` divides. Every rank has the same list.

There are three kinds, which differ in what a checkpoint needs of them:

- `SeededOrder`: the order follows from a seed and the epoch. Nothing is saved.
- `GlobalOrder`: that of `GlobalBatches`. The state of its generator at the start of an epoch is saved.
- `DrawnOrder`: a sampler of the user's own. The batches that it gave are saved, and the state of its generators.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from tutti.data.division import Batch
from tutti.data.samplers import AllRanksSampler, is_torchs, shuffled
from tutti.world import World

KEPT_EPOCHS = 2
"""Epochs before that of the committed position which orders remember: a rank that is lost may have been behind."""


class EpochOrder(ABC):
    """The batches of all ranks in each epoch."""

    needs_one_call: bool = True
    """Whether `merge` has all that a state needs, so that `complete` adds nothing."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Kind of order; a position in one of another kind has no meaning."""

    @abstractmethod
    def batches(self, epoch: int, num_parts: int, first_epoch: int) -> Sequence[Batch]:
        """Return the batches of an epoch, of which `num_parts` form a step. Collective for samplers of the user's own.

        Args:
            first_epoch: the epoch of the committed position: none before it is needed any more.
        """

    def own_state(self, first_epoch: int) -> Any:
        """Return what this rank knows, to be merged with that of the others."""
        return None

    def merge(self, values: dict[int, Any], positions: list[list[int]]) -> dict[str, Any]:
        """Return what a state has of the order, from the values of all ranks that are there."""
        return {}

    def complete(self, state: dict[str, Any], world: World) -> dict[str, Any]:
        """Return a state with what is too large for `merge`. Collective where ranks know different things."""
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Continue from what `merge` and `complete` have put into a state."""
        return


class SeededOrder(EpochOrder):
    """Orders that follow from a seed and the epoch: sequential, shuffled, or that of a `DistributedSampler`."""

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self._loader = loader
        self._seed = seed

    @property
    def name(self) -> str:
        sampler = self._loader.sampler
        is_shuffled = sampler.shuffle if isinstance(sampler, AllRanksSampler) else is_random(sampler)
        return "shuffled" if is_shuffled else "sequential"

    def batches(self, epoch: int, num_parts: int, first_epoch: int) -> Sequence[Batch]:
        loader = self._loader
        num_samples = len(loader.dataset)  # type: ignore[arg-type]
        if isinstance(sampler := loader.sampler, AllRanksSampler):
            sampler.epoch, sampler.num_ranks = epoch, num_parts
            order = list(sampler)
        elif is_random(sampler):
            order = shuffled(num_samples, self._seed, epoch)
        else:
            order = list(range(num_samples))
        return in_batches(order, loader)


def in_batches(order: Batch, loader: DataLoader[Any]) -> Sequence[Batch]:
    """Return samples in batches of the loader's size."""
    assert loader.batch_size is not None
    return list(BatchSampler(order, loader.batch_size, loader.drop_last))


def is_seeded(loader: DataLoader[Any]) -> bool:
    """Whether the order of a loader follows from a seed: torch's own samplers of the whole dataset, or ours."""
    sampler: Any = loader.sampler
    if loader.batch_size is None:
        return False
    if isinstance(sampler, AllRanksSampler):
        return True
    if not is_torchs(sampler) or not (isinstance(sampler, SequentialSampler) or is_random(sampler)):
        return False
    if getattr(sampler, "data_source", None) is not loader.dataset:
        return False
    # With replacement, or of another length, it is not a permutation of the dataset.
    return not is_random(sampler) or not (sampler.replacement or sampler._num_samples)


def is_random(sampler: Any) -> bool:
    """Whether a sampler is torch's `RandomSampler`, or torchdata's, which does not extend it."""
    return is_torchs(sampler) and type(sampler).__name__ == RandomSampler.__name__
