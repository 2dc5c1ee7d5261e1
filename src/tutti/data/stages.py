"""`Stage`: a part of a run that has ended on another number of ranks, and the items that it left over."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class Stage:
    """A part of a run that has ended, on another number of ranks: how its data was divided, and what it used."""

    num_parts: int
    """Number of ranks for which the steps were formed."""
    epochs: tuple[int, ...]
    """Epoch of every rank at the end of the stage."""
    steps: tuple[int, ...]
    """Committed items of every rank in that epoch."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.epochs)

    def num_used(self, rank: int, epoch: int) -> int | None:
        """Return how many items of an epoch a rank has used; None for all of them."""
        if epoch != self.epochs[rank]:
            return None if epoch < self.epochs[rank] else 0
        return self.steps[rank]

    def reached(self, epoch: int) -> bool:
        """Whether a rank has used anything of an epoch."""
        return any(self.num_used(rank, epoch) != 0 for rank in range(self.num_ranks))


def left_over(columns: Sequence[Sequence[Item]], stage: Stage, epoch: int) -> list[Item]:
    """Return the items of an epoch that a stage has not used, step by step; `columns` has those of each rank."""
    unused = []
    for rank, column in enumerate(columns):
        num_used = stage.num_used(rank, epoch)
        first = len(column) if num_used is None else num_used
        unused += [(step, rank) for step in range(first, len(column))]
    return [columns[rank][step] for step, rank in sorted(unused)]


def not_used(items: Iterable[Item], stages: Sequence[Stage], epoch: int, first: int = 0) -> Iterator[Item]:
    """Yield the items of an epoch, given to ranks in turn, that none of the stages has used.

    Args:
        first: number of the first of `items` in the epoch, where the ones before it have been left out.
    """
    for stage in stages:
        items = _not_used(items, stage, epoch, first)
        first = _num_left_over(first, stage, epoch)
    return iter(items)


def num_left_over(num_items: int, stages: Sequence[Stage], epoch: int) -> int:
    """Return how many of the first `num_items` items of an epoch none of the stages has used."""
    for stage in stages:
        num_items = _num_left_over(num_items, stage, epoch)
    return num_items


def _not_used(items: Iterable[Item], stage: Stage, epoch: int, first: int) -> Iterator[Item]:
    for number, item in enumerate(items, first):
        step, rank = divmod(number, stage.num_ranks)
        num_used = stage.num_used(rank, epoch)
        if num_used is not None and step >= num_used:
            yield item


def _num_left_over(num_items: int, stage: Stage, epoch: int) -> int:
    total = 0
    for rank in range(stage.num_ranks):
        num_used = stage.num_used(rank, epoch)
        if num_used is not None:
            total += max(len(range(rank, num_items, stage.num_ranks)) - num_used, 0)
    return total
