"""`Stream`: an iterable that is read from a saved place, where it can say what its place is.

How it works
------------
Every rank reads the whole iterable, so a place is the same for all of them: the number of items read. Most iterables
can only be read from their start, and the items before the place are passed over. One with `state_dict` and
`load_state_dict`, such as torchdata's StatefulDataLoader, continues at its own state.

Its state is that after the last item read, and not after the last committed one, so it is only taken when both are the
same. Otherwise the last one that was taken is used, and the items since then are passed over. The state of a
DataLoader is taken at the start of an epoch too: it may carry something from epoch to epoch.

A checkpoint has one state for each epoch in which a rank is: the one that saves most reading, among those that are not
beyond the first item that some rank has yet to use.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch.utils.data import DataLoader

from tutti.data.stages import Stage, num_left_over
from tutti.data.worker_start import KeptWorker, started

Place = tuple[int, int, Any]
"""An epoch, the number of its items that have been read, and the state of the iterable then."""


class Stream:
    """Reads an iterable once per epoch, from its start or from a saved place."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items: Any = items
        self.is_loader = isinstance(items, DataLoader)
        """Whether the iterable is a DataLoader, which draws a seed for its workers when an epoch begins."""
        if isinstance(items, DataLoader) and items.num_workers and not isinstance(items.worker_init_fn, KeptWorker):
            items.worker_init_fn = KeptWorker(items.worker_init_fn)
        self._has_state = hasattr(items, "state_dict") and hasattr(items, "load_state_dict")
        self._is_read = False
        """Whether reading has begun: before, there is nothing to say, and a DataLoader would start its workers."""
        self._num_read = 0
        self._saved: dict[int, Place] = {}
        """Places from a loaded state, by epoch."""
        self._taken: Place | None = None

    @property
    def generator(self) -> torch.Generator | None:
        """The generator from which a DataLoader draws the seed of its workers; None for torch's own."""
        return getattr(self._items, "generator", None)

    def read(
        self, epoch: int, limit: int, stages: Sequence[Stage], worker_seed: int | None
    ) -> tuple[int, Iterator[Any]]:
        """Return the number of the first item, and an iterator from there.

        Args:
            limit: number of the first item that is to be used, among those that `stages` have left over.
            worker_seed: seed of the DataLoader's workers, if it is one.
        """
        place = self._saved.pop(epoch, None)
        if place is not None and num_left_over(place[1], stages, epoch) <= limit:
            self._items.load_state_dict(place[2])
            self._taken = place
        elif self._has_state and self._is_read and self.is_loader:
            self._taken = (epoch, 0, deepcopy(self._items.state_dict()))
        else:
            self._taken = None
        first = self._taken[1] if self._taken else 0
        self._is_read = True
        own_seed = worker_seed is not None and self.generator is None
        # The seed that torch draws for the workers follows from the one that is given, and changes nothing else.
        with torch.random.fork_rng(devices=[]) if own_seed else nullcontext():
            if own_seed:
                torch.manual_seed(worker_seed)
            return first, self._counted(started(self._items) if self.is_loader else iter(self._items), first)

    def _counted(self, items: Iterator[Any], first: int) -> Iterator[Any]:
        self._num_read = first
        for item in items:
            self._num_read += 1
            yield item
        self._num_read = 0  # That of the next epoch.

    def place(self, epoch: int, is_settled: bool) -> Place | None:
        """Return the last known place in an epoch, or before it.

        Args:
            epoch: of the committed position.
            is_settled: whether all items that were read are committed, so that the state is that of the position.
        """
        if not self._has_state or not self._is_read:
            return self._saved.get(epoch)
        # At the end of an epoch only a DataLoader is known to go on with the next.
        if is_settled and (self._num_read or self.is_loader):
            self._taken = (epoch, self._num_read, deepcopy(self._items.state_dict()))
        return self._taken if self._taken is not None and self._taken[0] == epoch else None

    def load(self, places: Iterable[Place]) -> None:
        """Read from these places when their epochs come."""
        self._saved = {place[0]: (place[0], place[1], place[2]) for place in places} if self._has_state else {}


def best_places(
    places: Iterable[Place], positions: list[list[int]], stages: Sequence[Stage], num_ranks: int
) -> list[Place]:
    """Return for each epoch the place that saves most reading and lacks nothing, for ranks at these positions."""
    best: dict[int, Place] = {}
    for place in places:
        epoch, num_read = place[0], place[1]
        first_unused = min(
            steps * num_ranks + rank for rank, (at, steps) in enumerate(positions) if at == epoch
        )  # At least the rank whose place it is.
        if num_left_over(num_read, stages, epoch) <= first_unused and (epoch not in best or num_read > best[epoch][1]):
            best[epoch] = place
    return [best[epoch] for epoch in sorted(best)]
