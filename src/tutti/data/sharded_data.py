"""`ShardedData`: epochs and position of data that is divided between ranks, whatever its kind."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from typing import Any, Self

from tutti.coordination.activity import IDLE, Activity
from tutti.data.cursor import Cursor, Iteration
from tutti.data.trail import Trail
from tutti.errors import ConfigError
from tutti.world import World

_LOOK_S = 0.002
"""How often a rank at the end of its data looks whether ranks change, after a loss."""

_numbers = count()


class _RanksHaveChanged(Exception):
    """Ends a wait for ranks that are others now."""


class ShardedData(ABC):
    """This rank's part of the data, to iterate over once per epoch."""

    def __init__(self, world: World, cursor: Cursor) -> None:
        self._world = world
        self._cursor = cursor
        self.number = next(_numbers)
        """Its number among all that this process has made, in the order in which it made them."""
        self._last_epoch: int | None = None
        """The last epoch of the run, if `epochs` was told."""
        self._loop_regroupings = 0
        """How often ranks had changed when the loop under way began, or continued."""

    def _take_over(self) -> None:
        """Continue where the other ranks are, on a rank that has joined an elastic world. Called when all is set up."""
        elastic = self._world.elastic
        for state in elastic.data_states if elastic is not None else ():
            if self._cursor.fits(state):
                assert elastic is not None
                elastic.data_states.remove(state)
                elastic.data.add(self)
                self.load_state_dict(state)
                return

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
        """At the end of the last loop, wait for the other ranks; return whether one was lost and has left something.

        Ended by the other ranks, which come to this place too, or are lost. Then the coordinator has ranks change,
        which is waited for.
        """
        elastic, counts = self._world.elastic, self._world.sample_counts
        is_last = loop_epoch == self._last_epoch and not self._cursor.is_iterated
        if elastic is None or elastic.regrouping is None or not is_last or not counts.in_training:
            return False
        if all(exchange.equal_after_steps for exchange in self._world.usage.exchanges):
            return False  # All ranks take their last step together.
        before = self._cursor.num_regroupings
        try:
            present = self._world.collective(lambda: self._who_is_at_the_end(before))
        except _RanksHaveChanged:
            present = None
        deadline_s = time.monotonic() + self._world.transport.timeout.total_seconds()
        while present is not None and len(present) < self._world.size and self._cursor.num_regroupings == before:
            self._world.boundary()
            if time.monotonic() > deadline_s:
                break
            time.sleep(_LOOK_S)
        return self._cursor.num_regroupings != before and self._cursor.goes_on(loop_epoch)

    def _who_is_at_the_end(self, num_regroupings: int) -> list[int]:
        """Return the ranks that have come to the end of the last loop. Collective."""
        if self._cursor.num_regroupings != num_regroupings:
            raise _RanksHaveChanged  # What a lost rank has left comes first.
        exchanges = list(self._world.usage.exchanges)
        elastic = any(exchange.tolerates_loss for exchange in exchanges)  # Else a loss ends the wait.
        with ExitStack() as waits:
            for exchange in exchanges:
                waits.enter_context(exchange.out_of_data())
            present: list[int] = self._world.calls.call("the end of the data", None, sorted, elastic=elastic)
            return present

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
        return self._cursor.export()

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """Start the next epoch, or continue the one of a loaded state."""

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, which decides its order.

        Epochs count by themselves, so a loop need not call it. A loop written for `DistributedSampler` may: calls of
        `loader.sampler.set_epoch(epoch)`, and of the sampler that was given, come here. The epoch that comes next
        anyway keeps its position, so that such a loop may also continue from a loaded state. After a loop that was
        left early, the rest of its epoch is given up.
        """
        self._cursor.set_epoch(epoch)

    @property
    def epoch(self) -> int:
        """Number of the epoch that is under way, or of the next one where none is.

        After the loss of a rank that was behind, a loop also gives out what that has left of the epoch before.
        """
        return self._cursor.loop_epoch

    def epochs(self, num_epochs: int) -> Iterator[Self]:
        """Yield this data once per epoch until `num_epochs` are done, those of a loaded state included.

        An epoch whose loop is left early counts as done.
        """
        self._last_epoch = num_epochs - 1
        for epoch in range(self.epoch, num_epochs):
            self.set_epoch(epoch)
            yield self

    def state_dict(self) -> dict[str, Any]:
        """Return the position of all ranks in the data: the samples whose steps were taken. Collective.

        Another world continues from it, of the same number of ranks or not: it uses the rest of the epoch's samples,
        each once. It has JSON values and tensors, and is the same on every rank. Call it after a step: a batch whose
        step is not taken yet is used again by a run that continues.
        """
        return self._cursor.state_dict(None, lambda values, positions: {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position that `state_dict` returned; every rank loads it.

        Raises `ConfigError` if it is the position in other data, and then changes nothing.
        """
        self._cursor.load_state_dict(state)


def refuse_servers(world: World) -> None:
    """Raise if the data is divided between servers as well: their part would never be trained on."""
    if (trained := world.sample_counts.num_training_ranks) not in (None, world.size):
        raise ConfigError(
            f"shard: this divides the data between all {world.size} ranks, of which {trained} train and the others "
            "serve. Call tutti.shard after tutti.distribute, or with world=job.world."
        )


def loading(batches: Iterator[Any], activity: Activity) -> Iterator[Any]:
    """Yield the batches, and report when the training loop waits for one."""
    activity.enter("loading data")
    for batch in batches:
        activity.enter(IDLE)
        yield batch
        activity.enter("loading data")
    activity.enter(IDLE)
