"""`ShardedData`: epochs and position of data that is divided between ranks, whatever its kind."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, Self

from tutti.coordination.activity import IDLE, Activity
from tutti.data.elastic_data import ElasticData
from tutti.errors import ConfigError
from tutti.strategies.saved_state import PerRank
from tutti.world import World


class ShardedData(ElasticData):
    """This rank's part of the data, to iterate over once per epoch."""

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
        self._come_to_others()
        self._cursor.set_epoch(epoch)

    @property
    def epoch(self) -> int:
        """Number of the epoch that is under way, or of the next one where none is.

        After the loss of a rank that was behind, a loop also gives out what that has left of the epoch before.
        """
        self._come_to_others()
        return self._cursor.loop_epoch

    def epochs(self, num_epochs: int) -> Iterator[Self]:
        """Yield this data once per epoch until `num_epochs` are done, those of a loaded state included.

        An epoch whose loop is left early counts as done.
        """
        self._come_to_others(of_any_number=True)
        self._last_epoch = num_epochs - 1
        first = self.epoch
        for epoch in range(first, num_epochs):
            self.set_epoch(epoch)
            yield self
        elastic = self._world.elastic
        if elastic is not None and elastic.regrouping is not None:
            elastic.regrouping.arrived()
            if elastic.has_joined and first >= num_epochs and self._joins_at_the_end():
                yield self

    def state_dict(self) -> dict[str, Any]:
        """Return the position of all ranks in the data: the samples whose steps were taken. Collective.

        Another world continues from it, of the same number of ranks or not: it uses the rest of the epoch's samples,
        each once. It has JSON values and tensors, and is the same on every rank. Call it after a step: a batch whose
        step is not taken yet is used again by a run that continues.
        """
        self._come_to_others()
        return self._cursor.gather(self._rank_state)

    def rank_state(self, world: World) -> PerRank | None:
        """Return this rank's part of `state_dict`, for a call of `world` that gathers other values as well.

        None if it takes other calls: those of another world, or several.
        """
        return self._rank_state() if world is self._world else None

    def _rank_state(self) -> PerRank:
        return self._cursor.rank_state(None, lambda values, positions: {})

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
