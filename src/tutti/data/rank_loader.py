"""`RankLoader`: a copy of the user's DataLoader that loads the batches of one rank."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from tutti.data.division import Batch
from tutti.data.worker_start import KeptWorker, started


class _RankBatches:
    """A batch sampler that gives this rank's batches of the current epoch."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class RankLoader:
    """Loads batches of given samples, as the user's DataLoader does: with its workers, collation and pinning.

    The DataLoader is built once, so that its workers may live on. It has a generator of its own: in every epoch torch
    draws a seed for the workers, which must not change the state of another generator when an epoch is continued.
    """

    def __init__(self, source: DataLoader[Any]) -> None:
        self._batches = _RankBatches()
        self._generator = torch.Generator("cpu")
        start = KeptWorker(source.worker_init_fn) if source.num_workers else source.worker_init_fn
        self._loader = rebuilt(source, batch_sampler=self._batches, generator=self._generator, worker_init_fn=start)

    def load(self, batches: list[Batch], worker_seed: int) -> Iterator[Any]:
        """Return an iterator over the batches; none of them may be empty."""
        self._batches.batches = batches
        self._generator.manual_seed(worker_seed)
        # It takes the list and the seed here, so that a later call may set others.
        return started(self._loader)


def draw_seed(generator: torch.Generator | None) -> int:
    """Return a seed for workers, from the generator from which a DataLoader draws it."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator))


def rebuilt(loader: DataLoader[Any], **other: Any) -> DataLoader[Any]:
    """Return a copy of a loader with other batches: everything but its sampler and batch size is kept."""
    options: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        "pin_memory_device": loader.pin_memory_device,
    }
    return DataLoader(loader.dataset, **{**options, **other})
