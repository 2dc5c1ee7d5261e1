"""`ShardedData`: epochs and position of data that is divided between ranks, whatever its kind."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Self

from tutti.coordination.activity import IDLE, Activity
from tutti.data.cursor import Cursor, Iteration
from tutti.errors import ConfigError
from tutti.world import World

_numbers = count()


class ShardedData(ABC):
    """This rank's part of the data, to iterate over once per epoch."""

    def __init__(self, world: World, cursor: Cursor) -> None:
        self._world = world
        self._cursor = cursor
        self.number = next(_numbers)
        """Its number among all that this process has made, in the order in which it made them."""

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

    def _between_batches(self) -> bool:
        """Let the ranks of an elastic world change, between two batches of this rank; return whether they have."""
        elastic = self._world.elastic
        if elastic is None or not self._world.sample_counts.in_training:
            return False
        elastic.data.add(self)
        num_regroupings = self._cursor.num_regroupings
        self._world.boundary()
        return self._cursor.num_regroupings != num_regroupings

    def _through_changes(self, first: Iteration, give_out: Callable[[Iteration], Iterator[Any]]) -> Iterator[Any]:
        """Yield the items of a loop, also after the ranks of an elastic world have changed.

        Args:
            give_out: yields the items of this rank, and stops early when `_between_batches` returns True.
        """
        current: Iteration | None = first
        while current is not None:
            num_regroupings = self._cursor.num_regroupings
            yield from give_out(current)
            if self._cursor.num_regroupings == num_regroupings:
                return
            current = self._cursor.start_again(current)

    # For `tutti.job.elastic`, while the ranks of an elastic world change.

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and number of items of this rank that are committed."""
        return self._cursor.position

    @property
    def agreed_position(self) -> tuple[int, int]:
        """The last such position of which the steps of all ranks are in the model of each."""
        return self._cursor.agreed

    @agreed_position.setter
    def agreed_position(self, position: tuple[int, int]) -> None:
        self._cursor.agreed = position

    def regroup(self, positions: list[list[int]]) -> None:
        """Continue as another rank of another number of ranks, from the positions of the ranks that were there."""
        self._cursor.regroup(positions)

    def interrupted(self) -> None:
        """End loops that are under way: a position was loaded in the middle of them."""
        self._cursor.num_regroupings += 1

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
        """Number of the epoch that is under way, or of the next one where none is."""
        return self._cursor.epoch

    def epochs(self, num_epochs: int) -> Iterator[Self]:
        """Yield this data once per epoch until `num_epochs` are done, those of a loaded state included.

        An epoch whose loop is left early counts as done.
        """
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
