"""`ElasticData`: the part of sharded data that goes on when the ranks of an elastic world change.

How it works
------------
Ranks change between two batches of a loop (`_between_batches`), which the loop asks for after each. A loop then starts
again with its new share (`_through_changes`). At the end of the last loop a rank waits for the others (`end_of_data`),
which may leave it something. The job asks for positions, and sets new ones (`tutti.job.elastic`).

A rank that has joined, or was behind before its first loop, gets the positions of the others as states
(`Elasticity.data_states`): it cannot know to which data they belong before that data is made or iterated over. Each
state is taken once, by data of the same number, or by the first that fits when a loop begins.

Only the thread of the training loop is here. The waits are those of collective calls, and `end_of_data`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from tutti.data.cursor import Cursor, Iteration
from tutti.data.end_of_data import EndOfData
from tutti.data.trail import Trail
from tutti.errors import ReplicaMismatch
from tutti.world import World


class ElasticData(ABC):
    """Data whose loops continue when ranks are lost and come. `ShardedData` has what users call."""

    def __init__(self, world: World, cursor: Cursor) -> None:
        self._world = world
        self._cursor = cursor
        self.number = world.usage.num_data
        """Its number among all that this process has made in its world, in the order in which it made them."""
        world.usage.num_data += 1
        self.keeps_global_batch = cursor.keep == "global"
        """Whether the batch of all ranks stays the same when their number changes."""
        self._last_epoch: int | None = None
        """The last epoch of the run, if `epochs` was told."""
        self._loop_regroupings = 0
        """How often ranks had changed when the loop under way began, or continued."""

    def _take_over(self, *, of_any_number: bool = False) -> None:
        """Continue where the other ranks are, on a rank that has missed it; do nothing if that is done.

        Called when all is set up, and wherever the position is used before a loop (`_come_to_others`).

        Args:
            of_any_number: also take the position of data that another rank has made in another order. At the start of
                a loop only: before that, data which is made later may fit it better.
        """
        elastic = self._world.elastic
        if elastic is None or not elastic.data_states or self in elastic.data:
            return
        fitting = [state for state in elastic.data_states if not self._cursor.differences(state)]
        chosen = [state for state in fitting if state["number"] == self.number] or (fitting if of_any_number else [])
        if chosen:
            elastic.data_states = [state for state in elastic.data_states if state is not chosen[0]]
            elastic.data.add(self)
            self.load_state_dict(chosen[0])
            self.interrupted()

    def _come_to_others(self, *, of_any_number: bool = False) -> None:
        """Join the other ranks of an elastic world, if this one waits for that, and continue where they are."""
        self._world.arrive()
        self._take_over(of_any_number=of_any_number)

    def _begin_loop(self) -> Iteration:
        """Begin a loop, where the other ranks are if this one has joined them."""
        elastic = self._world.elastic
        if elastic is not None and self._world.sample_counts.in_training:
            self._come_to_others(of_any_number=True)
            if self not in elastic.data:
                _refuse_other_data(self._world, self.number, self._cursor)
        elif elastic is not None and self not in elastic.data:
            # For evaluation: all ranks divide it alike, in the order of the same epoch, whenever each has made it.
            elastic.evaluated.add(self)
            self._cursor.num_parts, self._cursor.stages = self._world.size, ()
            self._cursor.set_epoch(elastic.evaluated_epochs.pop(*next_epoch(self)))
        return self._cursor.start()

    def _between_batches(self, *, at_end: bool = False) -> bool:
        """Let the ranks of an elastic world change, between two batches of this rank; return whether they have.

        Args:
            at_end: whether there is no further batch in this loop.
        """
        elastic = self._world.elastic
        if elastic is None or not self._world.sample_counts.in_training:
            return False
        elastic.data.add(self)
        if self._cursor.num_regroupings == self._loop_regroupings:
            self._world.boundary(at_end=at_end)
        # Since the loop began, and not just now: another loop beside this one may have come here first.
        return self._cursor.num_regroupings != self._loop_regroupings

    def _through_changes(self, first: Iteration, give_out: Callable[[Iteration], Iterator[Any]]) -> Iterator[Any]:
        """Yield the items of a loop, also after the ranks of an elastic world have changed.

        Args:
            give_out: yields the items of this rank in an epoch, and stops early when `_between_batches` returns True.
        """
        cursor, current = self._cursor, first
        loop_epoch = cursor.loop_epoch
        while True:
            self._loop_regroupings = cursor.num_regroupings
            yield from give_out(current)
            if self._world.elastic is None:
                return
            # Of the same epoch with other ranks, or of the next one, if this was one that others had not used up.
            if not cursor.goes_on(loop_epoch) and not self._comes_back(loop_epoch):
                return
            current = cursor.start()

    def _comes_back(self, loop_epoch: int) -> bool:
        """At the end of a loop, wait for the other ranks if it is the last; return whether something is left."""
        is_last = loop_epoch == self._last_epoch and not self._cursor.is_iterated
        return is_last and EndOfData(self._world, self._cursor).wait(loop_epoch)

    def _joins_at_the_end(self) -> bool:
        """On a rank that has joined behind the last loop, wait for the others; return whether something is left."""
        assert self._last_epoch is not None
        self._cursor.loop_epoch = self._last_epoch
        return self._cursor.goes_on(self._last_epoch) or self._comes_back(self._last_epoch)

    # For `tutti.job.elastic`, while the ranks of an elastic world change.

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and number of items of this rank that are committed; the next epoch where that is all of them."""
        epoch, num_items = self._cursor.position
        return (epoch + 1, 0) if self._cursor.is_end(epoch, num_items) else (epoch, num_items)

    @property
    def trail(self) -> list[list[int]]:
        """The positions of this rank after each of its steps since ranks have changed (`Trail.export`)."""
        return self._cursor.committed.trail.export()

    def position_after(self, trails: list[list[list[int]]], num_steps: int) -> list[int]:
        """Return where a rank was after a number of steps, from the trails of others; the longest counts.

        Called before ranks change. Where that trail is too short, the loop is taken to have gone on as before.
        """
        longest = max(map(Trail.read, trails), key=lambda trail: trail.num_steps)
        epoch, num_items = longest.after(num_steps)
        while (length := self._column_length(epoch)) is not None and num_items >= length:
            epoch, num_items = epoch + 1, num_items - length
        return [epoch, num_items]

    def most_samples(self, trails: list[list[list[int]]], first: int, stop: int) -> int:
        """Return the most samples that a rank can have used between two numbers of steps, before ranks change."""
        (epoch, begin), (last_epoch, end) = (self.position_after(trails, number) for number in (first, stop))
        lengths = [self._column_length(each) for each in range(epoch, last_epoch)]
        num_items = end - begin + sum(length for length in lengths if length is not None)
        return num_items * self._samples_per_item

    @property
    def _samples_per_item(self) -> int:
        """The most samples of an item."""
        return max(1, self._world.sample_counts.num_samples)

    def _column_length(self, epoch: int) -> int | None:
        """Number of items of a rank in an epoch, as it is divided now; None if it is not known."""
        return None

    @property
    def agreed_position(self) -> tuple[int, int]:
        """The last such position of which the steps of all ranks are in the model of each."""
        return self._cursor.committed.agreed

    @agreed_position.setter
    def agreed_position(self, position: tuple[int, int]) -> None:
        self._cursor.committed.agreed = position

    def regroup(self, positions: list[list[int]]) -> None:
        """Continue as another rank of another number of ranks, from the positions of the ranks that were there."""
        self._cursor.regroup(positions)

    def interrupted(self) -> None:
        """A position was loaded in the middle of loops, which continue from it."""
        self._cursor.changed()

    def export(self) -> dict[str, Any]:
        """Return the position as a state that a new rank of this world can load. Not collective."""
        return {**self._cursor.export(), "number": self.number}

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position that another rank has exported."""


def _refuse_other_data(world: World, number: int, cursor: Cursor) -> None:
    """Raise `ReplicaMismatch` on a rank that has joined, if the others train on other data of this number."""
    assert world.elastic is not None
    for state in world.elastic.data_states:
        if state["number"] == number:
            raise ReplicaMismatch(
                f"rank {world.transport.world_rank}: this worker cannot train with the others, which train on other "
                f"data: {cursor.differences(state)}. Start it with the same script, options and data."
            )


def next_epoch(data: ElasticData) -> tuple[int, int]:
    """Return the number of some data, and that of the epoch that its next loop is over."""
    return data.number, data._cursor.loop_epoch + data._cursor.is_iterated
