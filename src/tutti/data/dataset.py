"""`ShardedDataset`: the samples of a map-style dataset, one by one."""

from collections.abc import Iterator
from typing import Any

from tutti.data.cursor import Cursor, Iteration
from tutti.data.division import refuse_empty, refuse_too_few
from tutti.data.in_turn import in_turn
from tutti.data.samplers import shuffled
from tutti.data.sharded_data import ShardedData, refuse_servers
from tutti.data.stages import num_left_over
from tutti.world import World


class ShardedDataset(ShardedData):
    """The samples of a map-style dataset, which go to the ranks one by one, in a new order every epoch."""

    def __init__(self, dataset: Any, seed: int, world: World) -> None:
        refuse_empty(len(dataset))
        refuse_too_few(len(dataset), world.size)
        description = {"kind": "dataset", "number of samples": len(dataset), "seed": seed}
        super().__init__(world, Cursor(world, "local", description))
        self._dataset = dataset
        self._seed = seed
        self._take_over()

    def __iter__(self) -> Iterator[Any]:
        refuse_servers(self._world)
        self._world.sample_counts.record_shard(len(self._dataset), 1, False, self._seed)
        return self._through_changes(self._begin_loop(), self._give_out)

    def _column_length(self, epoch: int) -> int | None:
        stages = [stage for stage in self._cursor.stages if stage.reached(epoch)]
        return -(-num_left_over(len(self._dataset), stages, epoch) // self._world.size)

    def _give_out(self, iteration: Iteration) -> Iterator[Any]:
        iteration.num_items = self._column_length(iteration.epoch) if self._world.sample_counts.in_training else None
        order = shuffled(len(self._dataset), self._seed, iteration.epoch)
        get = self._dataset.__getitem__
        return in_turn(order, self._cursor, iteration, get, self._between_batches)

    def __len__(self) -> int:
        self._come_to_others()
        # In training all ranks have as many items as the longest: the last one of some has weight 0 (`in_turn`).
        num_items = len(range(self._world.rank, len(self._dataset), self._world.size))
        return -(-len(self._dataset) // self._world.size) if self._world.sample_counts.in_training else num_items
