"""Start of a DataLoader's worker processes, which a job keeps until it has saved its state."""

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader


class KeptWorker:
    """What a worker process of a DataLoader does first: `keep_worker`, then the user's own function."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, number: int) -> None:
        keep_worker(number)
        if self._then is not None:
            self._then(number)


def keep_worker(number: int) -> None:
    """Have a worker of a DataLoader go on when SIGTERM or SIGUSR1 is sent to all processes of a job.

    Loaders given to `shard` do so by themselves. For another one, whose batches the loop needs before its next
    checkpoint, give this as `worker_init_fn`. The worker still ends with its parent, and when that ends it.
    """
    from tutti.data import worker_signals  # It imports Numba.

    worker_signals.keep_running()


def started(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return an iterator of a loader whose workers begin with `keep_worker`."""
    if not loader.num_workers:
        return iter(loader)
    from tutti.data import worker_signals  # Before the workers, which inherit what is compiled.

    context = loader.multiprocessing_context or multiprocessing
    with worker_signals.held_back(context.get_start_method()):
        return iter(loader)
