"""`in_turn`: items that go to the ranks one by one, from the first that is not used yet."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from tutti.coordination.activity import IDLE
from tutti.data.cursor import Cursor, Iteration
from tutti.data.division import refuse_empty, refuse_too_few
from tutti.data.stages import not_used, num_left_over
from tutti.replica.samples import num_rows


class Stops(Protocol):
    """Whether no more items are to be given out; `at_end` says that there are none."""

    def __call__(self, *, at_end: bool) -> bool: ...


def in_turn(
    items: Iterable[Any],
    cursor: Cursor,
    iteration: Iteration,
    get: Callable[[Any], Any],
    stops: Stops,
    first: int = 0,
) -> Iterator[Any]:
    """Yield every `size`-th item, from this rank's first that is not used yet.

    Where the number of items is not a multiple of the ranks, some ranks run out one item early. In training, such a
    rank gets its last item once more with weight 0: it contributes nothing, but takes part in the others' last step.

    Args:
        get: returns the value of an item. It is not called for items of other ranks, nor for those used before.
        stops: called before each item, and behind the last one; True if no more are to be given out, because the ranks
            have changed.
        first: number of the first of `items` in the epoch, where the ones before it have been left out.
    """
    world = cursor.world
    activity, counts, num_used = world.transport.activity, world.sample_counts, iteration.first
    activity.enter("loading data")
    stages = [stage for stage in cursor.stages if stage.reached(iteration.epoch)]
    start = num_left_over(first, stages, iteration.epoch)
    number = start - 1
    last: list[Any] = []  # Holds an item that stands in where this rank has none.
    for number, item in enumerate(not_used(items, stages, iteration.epoch, first), start):
        step, rank = divmod(number, world.size)
        if rank != world.rank or step < num_used:
            last = last or [item]
            continue
        last = [item]
        value = get(item)
        activity.enter(IDLE)
        if stops(at_end=False):
            return
        counts.record_batch(num_rows([value]))
        cursor.give_out(iteration)
        yield value
        activity.enter("loading data")
    activity.enter(IDLE)
    # Only known after the last item: an iterable need not have a length.
    if not stages:
        refuse_empty(number + 1)
        refuse_too_few(number + 1, world.size)
    num_steps, num_more = divmod(number + 1, world.size)
    is_missing = num_more and world.rank >= num_more and num_used <= num_steps
    if is_missing and last and counts.in_training:
        if stops(at_end=False):
            return
        counts.record_batch(0)
        cursor.give_out(iteration)
        yield get(last[0])
    if not stops(at_end=True):
        cursor.end(iteration)
