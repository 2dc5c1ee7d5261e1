"""`shard`: each rank's part of the data. Over all ranks, every sample comes exactly once per epoch."""

from collections.abc import Iterable, Sized
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from tutti.data.cursor import Keep
from tutti.data.dataset import ShardedDataset
from tutti.data.iterable import ShardedIterable
from tutti.data.loader import ShardedLoader
from tutti.errors import ConfigError
from tutti.world import World
from tutti.world import world as current_world


def shard(
    data: Dataset[Any] | DataLoader[Any] | Iterable[Any],
    *,
    seed: int = 0,
    keep: Keep = "global",
    split_batches: bool = False,
    world: World | None = None,
) -> ShardedLoader | ShardedDataset | ShardedIterable:
    """Return this rank's part of `data`, to iterate over once per epoch. Make it once: it counts the epochs.

    Its `state_dict` returns the position of all ranks in the data, for a checkpoint; `load_state_dict` continues there,
    on any number of ranks.

    Args:
        data: a DataLoader, whose batch size, workers, collation and pinning are kept (the batch size is
            per rank, and a DistributedSampler in it is replaced); a map-style dataset, whose samples come
            one by one, reshuffled every epoch; or any other iterable, whose items go to the ranks in turn.
            Each must be the same on every rank.
        seed: seed of the shuffle; each epoch has an order of its own.
        keep: what a run that continues on another number of ranks keeps of a DataLoader's batches: "global" splits the
            steps of the first world between the ranks that are there, "local" keeps the batch size per rank. Samples
            of a dataset and items of an iterable are one per rank in any case.
        split_batches: whether each batch of a DataLoader is split between the ranks, so that its batch size is that of
            a step and any number of ranks takes the steps of one. Otherwise each rank gets batches of that size.
        world: the ranks to divide between; the world that `tutti.init` made by default.
    """
    world = world or current_world()
    if keep not in ("global", "local"):
        raise ConfigError(f'shard: keep must be "global" or "local", got {keep!r}.')
    is_iterable = isinstance(data.dataset if isinstance(data, DataLoader) else data, IterableDataset)
    if split_batches and (is_iterable or not isinstance(data, DataLoader)):
        raise ConfigError(
            f"shard: split_batches is for a DataLoader of a dataset with a length, got a {type(data).__name__}"
            f"{' of an IterableDataset' if isinstance(data, DataLoader) else ''}. Leave it out."
        )
    if split_batches and keep == "local":
        raise ConfigError('shard: split_batches keeps the batches of a step, and keep="local" does not: leave one out.')
    if isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset):
        return ShardedLoader(data, seed, keep, world, split_batches=split_batches)
    # An IterableDataset may have a length too, but its items come in its own order only.
    map_style = hasattr(data, "__getitem__") and isinstance(data, Sized)
    if map_style and not isinstance(data, DataLoader | IterableDataset):
        return ShardedDataset(data, seed, world)
    if not isinstance(data, Iterable):
        raise ConfigError(f"shard needs a dataset, a DataLoader or an iterable, got a {type(data).__name__}.")
    return ShardedIterable(data, world)
