"""Global batches: batches that contain the same samples for any number of workers."""

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from tutti.errors import ConfigError


class GlobalBatches(Sampler[list[int]]):
    """A batch sampler of shuffled global batches, each cut into one part per worker.

    The samples of a step depend on the seed and the epoch only, not on the number of workers: N workers see the data
    that one worker sees, in the same steps. Use it as `shard(DataLoader(dataset, batch_sampler=GlobalBatches(...)))`.

    The last batch of an epoch also takes the samples that remain after it. So no batch is smaller than `batch_size`,
    and as many workers as `batch_size` have a part of each.

    Args:
        num_samples: length of the dataset.
        batch_size: samples per step over all workers.
        num_parts: number of workers.
        seed: of the shuffling; every epoch continues the same random sequence.
    """

    same_on_every_rank = True
    """Every rank draws the same batches by itself, so `shard` need not broadcast those of rank 0."""

    def __init__(self, num_samples: int, batch_size: int, num_parts: int, seed: int) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.num_parts = num_parts
        """Number of consecutive batches that form a step. `shard` sets it to that of the world whose run continues."""
        self.seed = seed
        # Ends of all batches but the last, which takes the remainder: hence no cut within `batch_size` of the end.
        self._cuts = list(range(batch_size, num_samples - batch_size + 1, batch_size))
        self.generator = torch.Generator().manual_seed(seed)
        """Gives the order of each epoch. Public, as that of torch's samplers: `shard` saves its state."""
        if num_parts > (smallest := min(batch_size, num_samples)):
            raise ConfigError(
                f"a batch of {smallest} samples cannot be cut for {num_parts} workers: each needs at least one. "
                f"Use {smallest} workers or fewer."
            )

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.num_samples, generator=self.generator)
        for batch in order.tensor_split(self._cuts):
            # Consecutive parts of one batch: `shard` gives each rank one of them, so that they form one step.
            yield from (part.tolist() for part in batch.tensor_split(self.num_parts))

    def __len__(self) -> int:
        return (len(self._cuts) + 1) * self.num_parts
