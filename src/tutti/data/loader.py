"""`ShardedLoader`: the batches of a DataLoader, divided between ranks."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from tutti.data.cursor import Cursor, Iteration, Keep
from tutti.data.division import (
    Batch,
    Remainder,
    batches_of_rank,
    divide_steps,
    form_steps,
    num_steps,
    refuse_empty,
    regroup,
)
from tutti.data.drawn_order import DrawnOrder
from tutti.data.epoch_order import EpochOrder, SeededOrder, is_seeded
from tutti.data.global_batches import GlobalBatches
from tutti.data.global_order import GlobalOrder
from tutti.data.rank_loader import RankLoader, draw_seed, rebuilt
from tutti.data.sampler_state import set_generator
from tutti.data.samplers import AllRanksSampler, undivided
from tutti.data.saved_position import refusing_damage
from tutti.data.sharded_data import ShardedData, loading, refuse_servers
from tutti.data.stages import left_over
from tutti.errors import ConfigError
from tutti.strategies.saved_state import PerRank
from tutti.world import World


class ShardedLoader(ShardedData):
    """The batches of a DataLoader, divided between ranks."""

    def __init__(
        self, loader: DataLoader[Any], seed: int, keep: Keep, world: World, *, split_batches: bool = False
    ) -> None:
        if loader.batch_sampler is None:
            raise ConfigError(
                "shard: a DataLoader with batch_size=None cannot be divided between ranks; give it a batch_size."
            )
        refuse_empty(len(loader.dataset))  # type: ignore[arg-type]
        refuse_empty(len(loader))
        self._seed = seed
        self._source = self._undivided(loader, world)
        self._order = _order(self._source, seed, world)
        description = _description(self._source, self._order, seed)
        super().__init__(world, Cursor(world, keep, description, split_batches))
        self._rank_loader = RankLoader(loader)
        self._num_steps = self._count_steps()
        self._take_over()

    def __iter__(self) -> Iterator[Any]:
        refuse_servers(self._world)
        source = self._source
        self._world.sample_counts.record_shard(len(source.dataset), source.batch_size, source.drop_last, self._seed)  # type: ignore[arg-type]
        iteration = self._begin_loop()
        # Drawn here, and not with the first batch: the order of an epoch may come from a generator of the user's.
        loaded = self._load(iteration)
        return self._through_changes(
            iteration,
            lambda current: self._give_out(current, *(loaded if current is iteration else self._load(current))),
        )

    def _load(self, iteration: Iteration) -> tuple[list[Batch], Iterator[Any]]:
        """Start to load this rank's batches of an epoch, from the first that is not used; return them with their items.

        A rank that has no sample in a step loads some others, so that it can take part.
        """
        batches = self._batches_of_rank(iteration.epoch)
        iteration.num_items = len(batches)
        batches = batches[iteration.first :]
        worker_seed = self._cursor.worker_seed(lambda: draw_seed(self._source.generator))
        placeholder = next(filter(None, batches), self._placeholder)
        loaded = self._rank_loader.load([batch or placeholder for batch in batches], worker_seed)
        return batches, loading(loaded, self._world.transport.activity)

    def _give_out(self, iteration: Iteration, batches: list[Batch], items: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, and record the size of each when it is used."""
        counts, cursor = self._world.sample_counts, self._cursor
        # Sizes are known from the indices, whatever the collate function makes of the samples.
        for batch, item in zip(batches, items, strict=True):
            if self._between_batches():
                return
            # Just before the batch is used: the loader's prefetching must not count batches ahead of time.
            if batch or counts.in_training:
                counts.record_batch(len(batch))
                cursor.give_out(iteration)
                yield item
            else:  # Nobody waits for this rank: it would only see samples a second time.
                cursor.give_out(iteration)
        if self._between_batches(at_end=True):
            return
        cursor.end(iteration)

    def __len__(self) -> int:
        """Number of steps of a whole epoch."""
        self._come_to_others()
        return self._num_steps

    def state_dict(self) -> dict[str, Any]:
        """Return the position of all ranks in the data: the samples whose steps were taken. Collective."""
        return self._order.complete(super().state_dict(), self._world)

    def rank_state(self, world: World) -> PerRank | None:
        return super().rank_state(world) if self._order.needs_one_call else None

    def _rank_state(self) -> PerRank:
        order, generator = self._order, self._source.generator

        def merge(values: dict[int, Any], positions: list[list[int]]) -> dict[str, Any]:
            # All ranks have drawn the same from the loader's generator, but for those that are epochs behind.
            furthest = max(values, key=lambda rank: positions[rank][0])
            own = {} if generator is None else {"loader_generator": values[furthest][1]}
            return {**own, **order.merge({rank: value[0] for rank, value in values.items()}, positions)}

        own = [order.own_state(self._cursor.position[0]), None if generator is None else generator.get_state()]
        return self._cursor.rank_state(own, merge)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position that `state_dict` returned; every rank loads it."""
        self._cursor.load_state_dict(state)
        with refusing_damage():
            if self._source.generator is not None and "loader_generator" in state:
                set_generator(self._source.generator, state["loader_generator"])
            self._order.load(state)
        self._num_steps = self._count_steps()

    def regroup(self, positions: list[list[int]]) -> None:
        super().regroup(positions)
        self._num_steps = self._count_steps()

    def _begin_loop(self) -> Iteration:
        iteration = super()._begin_loop()
        self._num_steps = self._count_steps()
        return iteration

    @property
    def _samples_per_item(self) -> int:
        # Steps of a larger world are split among the ranks that are left, whose batches are larger.
        whole = (self._source.batch_size or self._world.sample_counts.num_samples) * self._cursor.num_parts
        return max(1, -(-whole // self._world.size))

    def _column_length(self, epoch: int) -> int | None:
        if isinstance(self._order, DrawnOrder):
            return None  # A draw may be a collective call, and cannot be repeated.
        return len(self._batches_of_rank(epoch))

    def export(self) -> dict[str, Any]:
        """Return the position and the order as a state that a new rank of this world can load. Not collective."""
        state, order, generator = super().export(), self._order, self._source.generator
        epoch = self._cursor.position[0]
        own = {} if generator is None else {"loader_generator": generator.get_state()}
        merged = order.merge({self._world.rank: order.own_state(epoch)}, state["positions"])
        return order.complete({**state, **own, **merged}, self._world)

    @property
    def dataset(self) -> Any:
        """The dataset of all ranks."""
        return self._source.dataset

    @property
    def sampler(self) -> "ShardedLoader":
        """This loader itself, for loops that call `loader.sampler.set_epoch(epoch)`."""
        return self

    def _undivided(self, loader: DataLoader[Any], world: World) -> DataLoader[Any]:
        """Return the loader, or one of all ranks' samples if a `DistributedSampler` has divided them already."""
        if (sampler := undivided(loader, self._seed, world)) is None:
            return loader
        batches: Any = loader.batch_sampler
        batches.sampler.set_epoch = self.set_epoch  # A loop written for it still calls it.
        return rebuilt(loader, sampler=sampler, batch_size=batches.batch_size, drop_last=batches.drop_last)

    def _batches_of_rank(self, epoch: int) -> list[Batch]:
        """Return this rank's share of the batches of an epoch, or of what earlier worlds left over of them."""
        cursor, drop_last = self._cursor, self._drops_last
        stages = [stage for stage in cursor.stages if stage.reached(epoch)]
        num_parts = stages[0].num_parts if stages else cursor.num_parts
        batches = self._order.batches(epoch, num_parts, cursor.position[0])
        refuse_empty(len(batches))
        self._placeholder = batches[0]
        remainder = Remainder.DROP if drop_last else Remainder.SPLIT
        for stage in stages:
            columns = divide_steps(form_steps(batches, stage.num_parts, remainder), stage.num_ranks)
            batches = [batch for batch in left_over(columns, stage, epoch) if batch]
            if stage.num_parts != stage.num_ranks and self._source.batch_size is not None:
                batches = regroup(batches, self._source.batch_size)  # Its ranks had batches of other sizes.
            remainder = Remainder.PAD if drop_last else Remainder.SPLIT_OR_EMPTY
        steps = form_steps(batches, cursor.num_parts, remainder)
        if not stages:
            refuse_empty(len(steps))
        return batches_of_rank(steps, self._world.size, self._world.rank)

    @property
    def _drops_last(self) -> bool:
        return getattr(self._source.batch_sampler, "drop_last", False)

    def _count_steps(self) -> int:
        """Return the number of steps: exact for a sampler, the most there can be for a batch sampler of the user's."""
        num_parts = self._cursor.num_parts
        if self._source.batch_size is None:
            return -(-len(self._source) // num_parts)  # Rounded up: a last, incomplete step may be joined.
        if isinstance(sampler := self._source.sampler, AllRanksSampler):
            sampler.num_ranks = num_parts
        num_samples = len(self._source.sampler)  # type: ignore[arg-type]
        steps = num_steps(num_samples, self._source.batch_size, self._drops_last, num_parts)
        refuse_empty(steps)
        return steps


def _order(loader: DataLoader[Any], seed: int, world: World) -> EpochOrder:
    """Return the order of a loader's batches."""
    if is_seeded(loader):
        return SeededOrder(loader, seed)
    if type(loader.batch_sampler) is GlobalBatches:
        return GlobalOrder(loader.batch_sampler)
    return DrawnOrder(loader, world)


def _description(loader: DataLoader[Any], order: EpochOrder, seed: int) -> dict[str, Any]:
    """Return what must be the same when a position in the data of a loader is used."""
    sampler = loader.sampler if isinstance(loader.sampler, AllRanksSampler) else loader.batch_sampler
    return {
        "kind": "DataLoader",
        "number of samples": len(loader.dataset),  # type: ignore[arg-type]
        "batch_size": getattr(loader.batch_sampler, "batch_size", None),
        "drop_last": loader.drop_last,
        "order": order.name,
        "seed": sampler.seed if isinstance(sampler, AllRanksSampler | GlobalBatches) else seed,
    }
