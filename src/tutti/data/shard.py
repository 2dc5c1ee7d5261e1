"""`shard`: each rank's part of the data. Over all ranks, every sample comes exactly once per epoch."""

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import pairwise
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from tutti.collectives import broadcast_json
from tutti.coordination.activity import IDLE, Activity
from tutti.data.samplers import AllRanksSampler, shuffled, undivided
from tutti.errors import ConfigError
from tutti.replica import SampleCounts
from tutti.replica.samples import num_rows
from tutti.world import World
from tutti.world import world as current_world

Batch = list[int]
"""Indices of the samples of one batch on one rank."""


def shard(
    data: Dataset[Any] | DataLoader[Any] | Iterable[Any], *, seed: int = 0, world: World | None = None
) -> "ShardedLoader | ShardedDataset | ShardedIterable":
    """Return this rank's part of `data`, to iterate over once per epoch. Make it once: it counts the epochs.

    Args:
        data: a DataLoader, whose batch size, workers, collation and pinning are kept (the batch size is
            per rank, and a DistributedSampler in it is replaced); a map-style dataset, whose samples come
            one by one, reshuffled every epoch; or any other iterable, whose items go to the ranks in turn.
            Each must be the same on every rank.
        seed: seed of the shuffle; each epoch has an order of its own.
        world: the ranks to divide between; the world that `tutti.init` made by default.
    """
    world = world or current_world()
    if isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset):
        return ShardedLoader(data, seed, world)
    # An IterableDataset may have a length too, but its items come in its own order only.
    map_style = hasattr(data, "__getitem__") and isinstance(data, Sized)
    if map_style and not isinstance(data, DataLoader | IterableDataset):
        return ShardedDataset(data, seed, world)
    if not isinstance(data, Iterable):
        raise ConfigError(f"shard needs a dataset, a DataLoader or an iterable, got a {type(data).__name__}.")
    return ShardedIterable(data, world)


def divide_batches(batches: Sequence[Batch], num_ranks: int) -> list[list[Batch]]:
    """Return the batches of each rank: one of every step, the same number of steps on all ranks, none of them empty.

    Each `num_ranks` consecutive batches are one step. Samples of batches that are left over at the end are split
    evenly; where they are fewer than the ranks, they join the step before.
    """
    num_in_full_steps = len(batches) // num_ranks * num_ranks
    steps = [list(batches[start : start + num_ranks]) for start in range(0, num_in_full_steps, num_ranks)]
    pool = [index for batch in batches[num_in_full_steps:] for index in batch]
    # A rank without a sample would take no part in the last step, for which the others would wait.
    if pool and len(pool) < num_ranks and steps:
        pool = [index for batch in steps.pop() for index in batch] + pool
    if pool:
        _refuse_too_few(len(pool), num_ranks)
        steps.append(_split(pool, num_ranks))
    return [[step[rank] for step in steps] for rank in range(num_ranks)]


def _split(pool: Batch, num_parts: int) -> list[Batch]:
    """Cut a pool of samples into parts whose lengths differ by one at most."""
    size, extra = divmod(len(pool), num_parts)
    starts = [part * size + min(part, extra) for part in range(num_parts + 1)]  # The first `extra` parts have one more.
    return [pool[start:stop] for start, stop in pairwise(starts)]


def _refuse_empty(num_samples: int) -> None:
    if num_samples == 0:
        raise ConfigError("shard: the data is empty (length 0). Look at its path, its filter or its split.")


def _refuse_servers(world: World) -> None:
    """Raise if the data is divided between servers as well: their part would never be trained on."""
    if (trained := world.sample_counts.num_training_ranks) not in (None, world.size):
        raise ConfigError(
            f"shard: this divides the data between all {world.size} ranks, of which {trained} train and the others "
            "serve. Call tutti.shard after tutti.distribute, or with world=job.world."
        )


def _refuse_too_few(num_samples: int, num_ranks: int) -> None:
    if num_samples < num_ranks:
        raise ConfigError(
            f"shard: {num_samples} samples cannot be divided between {num_ranks} ranks: each needs at least one. "
            "Use fewer workers, or more data."
        )


class _RankBatches:
    """A batch sampler that gives this rank's batches of the current epoch."""

    def __init__(self, num_batches: int) -> None:
        self.batches: list[Batch] = []
        self._num_batches = num_batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def __len__(self) -> int:
        return self._num_batches


class ShardedLoader:
    """The batches of a DataLoader, divided between ranks."""

    def __init__(self, loader: DataLoader[Any], seed: int, world: World) -> None:
        if loader.batch_sampler is None:
            raise ConfigError(
                "shard: a DataLoader with batch_size=None cannot be divided between ranks; give it a batch_size."
            )
        _refuse_empty(len(loader.dataset))  # type: ignore[arg-type]
        _refuse_empty(len(loader))
        self._world = world
        self._seed = seed
        self._source = self._undivided(loader)
        self._epoch = 0
        self._rank_batches = _RankBatches(self._num_steps())
        self._loader = _rebuilt(loader, batch_sampler=self._rank_batches)

    def __iter__(self) -> Iterator[Any]:
        _refuse_servers(self._world)
        source = self._source
        self._world.sample_counts.record_shard(len(source.dataset), source.batch_size, source.drop_last, self._seed)  # type: ignore[arg-type]
        # The loader was built once, and reads this list at the start of every epoch.
        self._rank_batches.batches = self._divide(self._epoch_batches())
        self._epoch += 1
        sizes = [len(batch) for batch in self._rank_batches.batches]
        # Sizes are known from the indices, whatever the collate function makes of the samples.
        return _counted(loading(self._loader, self._world.transport.activity), iter(sizes), self._world.sample_counts)

    def __len__(self) -> int:
        return len(self._rank_batches)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, which decides its order, as after loading a checkpoint.

        Epochs count by themselves, so a loop need not call it. A loop written for `DistributedSampler` may: calls of
        `loader.sampler.set_epoch(epoch)`, and of the sampler that was given, come here.
        """
        self._epoch = epoch

    @property
    def dataset(self) -> Any:
        """The dataset of all ranks."""
        return self._source.dataset

    @property
    def sampler(self) -> "ShardedLoader":
        """This loader itself, for loops that call `loader.sampler.set_epoch(epoch)`."""
        return self

    def _undivided(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return the loader, or one of all ranks' samples if a `DistributedSampler` has divided them already."""
        if (sampler := undivided(loader, self._seed, self._world)) is None:
            return loader
        batches: Any = loader.batch_sampler
        batches.sampler.set_epoch = self.set_epoch  # A loop written for it still calls it.
        return _rebuilt(loader, sampler=sampler, batch_size=batches.batch_size, drop_last=batches.drop_last)

    def _divide(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return this rank's share of the batches of an epoch."""
        if getattr(self._source.batch_sampler, "drop_last", False):
            # All batches stay of one size: none is joined or split.
            batches = batches[: len(batches) // self._world.size * self._world.size]
            _refuse_empty(len(batches))
        return divide_batches(batches, self._world.size)[self._world.rank]

    def _num_steps(self) -> int:
        """Return the number of steps: exact for a sampler, the most there can be for a batch sampler of the user's."""
        if self._source.batch_size is not None:
            return len(self._divide(self._batched(list(range(len(self._source.sampler))))))  # type: ignore[arg-type]
        return -(-len(self._source) // self._world.size)  # Rounded up: a last, incomplete step may be joined.

    def _epoch_batches(self) -> Sequence[Batch]:
        """Return the batches of all ranks in this epoch, the same list on every rank."""
        num_samples = len(self._source.dataset)  # type: ignore[arg-type]
        if isinstance(sampler := self._source.sampler, AllRanksSampler):
            sampler.epoch = self._epoch
            return self._batched(list(sampler))
        if _is_plain(self._source, SequentialSampler):
            return self._batched(list(range(num_samples)))
        if _is_plain(self._source, RandomSampler):
            return self._batched(shuffled(num_samples, self._seed, self._epoch))
        assert self._source.batch_sampler is not None
        if getattr(self._source.batch_sampler, "same_on_every_rank", False):
            return list(self._source.batch_sampler)
        # A sampler of the user's own may use any generator: rank 0's batches hold for all.
        batches = [list(map(int, batch)) for batch in self._source.batch_sampler] if self._world.rank == 0 else None
        with self._world.waiting():
            return broadcast_json(batches, self._world.transport)

    def _batched(self, order: Batch) -> Sequence[Batch]:
        assert self._source.batch_size is not None
        return list(BatchSampler(order, self._source.batch_size, self._source.drop_last))


def _is_plain(loader: DataLoader[Any], kind: type) -> bool:
    """Whether the loader goes through its whole dataset with a sampler of torch's own, so that its order is known."""
    sampler = loader.sampler
    if (
        loader.batch_size is None
        or type(sampler) is not kind
        or getattr(sampler, "data_source", None) is not loader.dataset
    ):
        return False
    # With replacement, or of another length, it is not a permutation of the dataset.
    return not isinstance(sampler, RandomSampler) or not (sampler.replacement or sampler._num_samples)


def _rebuilt(loader: DataLoader[Any], **batching: Any) -> DataLoader[Any]:
    """Return a copy of the loader with other batches."""
    # Everything of the user's loader but its sampler and batch size, which `batching` replaces.
    return DataLoader(
        loader.dataset,
        **batching,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        pin_memory_device=loader.pin_memory_device,
    )


def _counted(items: Iterator[Any], sizes: Iterator[int], sample_counts: SampleCounts) -> Iterator[Any]:
    """Yield the items, and record the size of each batch when it is used."""
    for item, size in zip(items, sizes, strict=True):
        # Just before the batch is used: the loader's prefetching must not count batches ahead of time.
        sample_counts.record_batch(size)
        yield item


class ShardedDataset:
    """The samples of a map-style dataset, which go to the ranks one by one, in a new order every epoch."""

    def __init__(self, dataset: Any, seed: int, world: World) -> None:
        _refuse_empty(len(dataset))
        _refuse_too_few(len(dataset), world.size)
        self._dataset = dataset
        self._seed = seed
        self._world = world
        self._epoch = 0

    def __iter__(self) -> Iterator[Any]:
        _refuse_servers(self._world)
        self._world.sample_counts.record_shard(len(self._dataset), 1, False, self._seed)
        order = shuffled(len(self._dataset), self._seed, self._epoch)
        self._epoch += 1
        return _in_turn(enumerate(order), self._world, self._dataset.__getitem__)

    def __len__(self) -> int:
        # In training all ranks have as many items as the longest: the last one of some has weight 0 (`_in_turn`).
        num_items = len(range(self._world.rank, len(self._dataset), self._world.size))
        return -(-len(self._dataset) // self._world.size) if self._world.sample_counts.in_training else num_items

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, as after loading a checkpoint."""
        self._epoch = epoch


class ShardedIterable:
    """The items of an iterable, which go to the ranks in turn. Every rank reads all of them and keeps its own."""

    def __init__(self, items: Iterable[Any], world: World) -> None:
        if isinstance(items, Sized) and not isinstance(items, DataLoader):
            _refuse_empty(len(items))
        self._items = items
        self._world = world

    def __iter__(self) -> Iterator[Any]:
        _refuse_servers(self._world)
        return _in_turn(enumerate(self._items), self._world, lambda item: item)


def loading(batches: Iterable[Any], activity: Activity) -> Iterator[Any]:
    """Yield the batches, and report when the training loop waits for one."""
    activity.enter("loading data")
    for batch in batches:
        activity.enter(IDLE)
        yield batch
        activity.enter("loading data")
    activity.enter(IDLE)


def _in_turn(items: Iterator[tuple[int, Any]], world: World, get: Callable[[Any], Any]) -> Iterator[Any]:
    """Yield every `size`-th item, from this rank's first.

    Where the number of items is not a multiple of the ranks, some ranks run out one item early. In training, such a
    rank gets its last item once more with weight 0: it contributes nothing, but takes part in the others' last step.
    """
    activity = world.transport.activity
    activity.enter("loading data")
    number, local = -1, []  # `local` holds this rank's last item, if it has had one.
    for number, item in items:
        if number % world.size == world.rank:
            local = [get(item)]  # Items of other ranks are not even loaded.
            activity.enter(IDLE)
            world.sample_counts.record_batch(num_rows(local))
            yield local[0]
            activity.enter("loading data")
    activity.enter(IDLE)
    # Only known after the last item: an iterable need not have a length.
    _refuse_empty(number + 1)
    _refuse_too_few(number + 1, world.size)
    left_over = (number + 1) % world.size
    if local and left_over and world.rank >= left_over and world.sample_counts.in_training:
        world.sample_counts.record_batch(0)
        yield local[0]
