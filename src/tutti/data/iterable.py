"""`ShardedIterable`: the items of an iterable, in turn."""

from collections.abc import Iterable, Iterator, Sized
from typing import Any

from torch.utils.data import DataLoader

from tutti.data.cursor import Cursor, Iteration
from tutti.data.division import refuse_empty
from tutti.data.in_turn import in_turn
from tutti.data.rank_loader import draw_seed
from tutti.data.saved_position import refusing_damage
from tutti.data.sharded_data import ShardedData, refuse_servers
from tutti.data.stream import Stream, best_places
from tutti.errors import ConfigError
from tutti.strategies.saved_state import PerRank
from tutti.world import World


class ShardedIterable(ShardedData):
    """The items of an iterable, which go to the ranks in turn. Every rank reads all of them and keeps its own."""

    def __init__(self, items: Iterable[Any], world: World) -> None:
        if isinstance(items, Sized) and not isinstance(items, DataLoader):
            refuse_empty(len(items))
        super().__init__(world, Cursor(world, "local", _description(items)))
        if world.elastic is not None and isinstance(items, Iterator):
            raise ConfigError(
                "shard: an iterator can be read once only, and after a change of the workers it would be read again. "
                "Give the iterable that makes it, or a fixed number of workers."
            )
        self._stream = Stream(items)
        self._take_over()

    def __iter__(self) -> Iterator[Any]:
        refuse_servers(self._world)
        return self._through_changes(self._begin_loop(), self._give_out)

    def _give_out(self, iteration: Iteration) -> Iterator[Any]:
        cursor, stream, world = self._cursor, self._stream, self._world
        seed = cursor.worker_seed(lambda: draw_seed(stream.generator)) if stream.is_loader else None
        first_unused = iteration.first * world.size + world.rank
        first, items = stream.read(iteration.epoch, first_unused, cursor.stages, seed)
        return in_turn(items, cursor, iteration, lambda item: item, self._between_batches, first)

    def _rank_state(self) -> PerRank:
        cursor, stages, num_ranks = self._cursor, self._cursor.stages, self._world.size

        def merge(values: dict[int, Any], positions: list[list[int]]) -> dict[str, Any]:
            places = best_places([place for place in values.values() if place], positions, stages, num_ranks)
            return {"places": [list(place) for place in places]}

        place = self._stream.place(cursor.position[0], cursor.committed.is_settled)
        return cursor.rank_state(place, merge)

    def export(self) -> dict[str, Any]:
        """Return the position as a state that a new rank of this world can load. Not collective."""
        place = self._stream.place(self._cursor.position[0], self._cursor.committed.is_settled)
        return {**super().export(), "places": [] if place is None else [list(place)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position that `state_dict` returned; every rank loads it."""
        self._cursor.load_state_dict(state)
        with refusing_damage():
            self._stream.load(state["places"])


def _description(items: Iterable[Any]) -> dict[str, Any]:
    """Return what must be the same when a position in an iterable is used: of most, nothing is known."""
    description: dict[str, Any] = {"kind": "iterable"}
    if isinstance(items, DataLoader):  # Its items are batches.
        description["batch_size"] = items.batch_size
    return description
