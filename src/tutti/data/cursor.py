"""`Cursor`: the position of a whole world in its data, which a checkpoint keeps.

How it works
------------
The data of an epoch is a sequence of *items*: batches of a DataLoader, samples of a dataset, whatever an iterable
gives. They are divided into columns, one per rank: in step k every rank takes the k-th item of its column.

An item is *given out* when the loop gets it, and *committed* when an optimiser of a distributed model has taken a step
afterwards. What a DataLoader has prefetched, and items whose gradients still accumulate, are not committed. Nobody
takes steps where no model is distributed, or gradients are disabled: there an item is committed when it is given out.

So there are two positions. The loop's is the epoch that is iterated over and the items given out in it. The committed
one follows it, at the next step: `_pending` has what is between them, as the position that each item leads to. The end
of an epoch, which the loop notices after the last item, is one more entry: the committed position leaves an epoch only
when all its items are committed. An epoch whose loop is left early stays the position until the next loop, or
`set_epoch`, gives up the rest of it.

The committed position of a rank is a pair: its epoch, and the committed items of its column. Under synchronous
strategies all ranks have the same pair; under asynchronous ones they may be apart, by epochs too. The pairs of all
ranks say which samples are used, in a few bytes, because the order of an epoch follows from its seed and number.

A world of another size continues in one of two ways:

- `keep="global"`: the steps stay what they were, and each is split between the ranks that are there now. `num_parts`
  remembers for how many ranks the steps were formed. The result is the one of the undisturbed run.
- `keep="local"`, or ranks that were apart: every rank keeps its batch size. What was used so far becomes a `Stage`: the
  items that it left over are divided anew. A run that changes its size several times in an epoch has several stages.

Only the thread of the training loop writes a cursor. Nothing here waits but `gather`, a collective call.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from tutti.data.saved_position import SavedPosition
from tutti.data.stages import Stage
from tutti.strategies.saved_state import PerRank
from tutti.world import World

Keep = Literal["global", "local"]

Merge = Callable[[dict[int, Any], list[list[int]]], dict[str, Any]]
"""From what every rank adds to a state, by rank, and the positions of all ranks, to what the state has of it."""


@dataclass(eq=False)
class Iteration:
    """One loop over an epoch."""

    epoch: int
    first: int
    """Items of this rank that were committed before the loop began: they are not given out again."""
    num_given_out: int
    """Items of this rank that the loop has got, with those before `first`."""


class Cursor:
    """The position of this rank, and what is known of the world's earlier stages."""

    def __init__(self, world: World, keep: Keep, data: dict[str, Any]) -> None:
        """Start at the beginning. `data` describes the data: a state of other data is refused."""
        self._world = world
        self._keep = keep
        self._data = data
        self.num_parts = world.size
        """Number of ranks for which steps are formed."""
        self.stages: tuple[Stage, ...] = ()
        self.epoch = 0
        """Number of the epoch that is under way, or that comes next."""
        self._committed = (0, 0)
        """Epoch, and number of items that are committed in it."""
        self._pending: deque[tuple[int, int, int]] = deque()
        """Number of a batch among all that the world gave out, and the position once that batch is committed."""
        self._iteration: Iteration | None = None
        """The loop under way."""
        self._worker_seeds: dict[int, int] = {}
        """Seeds of DataLoader workers in epochs that have begun."""

    def start(self) -> Iteration:
        """Start a loop. If the one before was left before its end, the rest of its epoch is given up."""
        if self._iteration is not None:
            self._go_to(self.epoch + 1)
        epoch, num_items = self.position
        first = num_items if epoch == self.epoch else 0
        self._iteration = Iteration(self.epoch, first, first)
        return self._iteration

    def give_out(self, iteration: Iteration) -> None:
        """Record that a loop gets an item, after `SampleCounts.record_batch`."""
        iteration.num_given_out += 1
        if iteration is not self._iteration:
            return  # Another loop over the same data has begun since.
        self._commit()  # Here too, so that those that wait are few, however long no state is asked for.
        counts = self._world.sample_counts
        # 0 where no step will follow: the item is committed as soon as those before it are.
        number = counts.num_batches if torch.is_grad_enabled() and counts.distributed else 0
        self._pending.append((number, iteration.epoch, iteration.num_given_out))

    def end(self, iteration: Iteration) -> None:
        """Record that a loop came to the end of its epoch: the next one follows."""
        if iteration is self._iteration:
            self.epoch += 1
            self._iteration = None
            number = self._pending[-1][0] if self._pending else 0
            self._pending.append((number, self.epoch, 0))

    def _commit(self) -> None:
        pending, num_committed = self._pending, self._world.sample_counts.num_committed
        while pending and pending[0][0] <= num_committed:
            _, epoch, num_items = pending.popleft()
            self._committed = (epoch, num_items)

    @property
    def position(self) -> tuple[int, int]:
        """Epoch of this rank, and the items of it that are committed."""
        self._commit()
        return self._committed

    @property
    def is_settled(self) -> bool:
        """Whether all that was given out is committed."""
        self._commit()
        return not self._pending

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; the one that comes next anyway keeps its position."""
        if epoch != self.epoch or self._iteration is not None:
            self._go_to(epoch)

    def _go_to(self, epoch: int) -> None:
        self.epoch, self._committed = epoch, (epoch, 0)
        self._iteration = None
        self._pending.clear()
        self._worker_seeds.clear()

    def worker_seed(self, draw: Callable[[], int]) -> int:
        """Return the seed of the DataLoader's workers in this epoch: `draw()`, or that of the loop that it continues.

        A loop that continues an epoch must draw nothing from torch's generator, which has been restored to its state
        in the middle of the epoch.
        """
        first = self.position[0]
        self._worker_seeds = {epoch: seed for epoch, seed in self._worker_seeds.items() if epoch >= first}
        if self.epoch not in self._worker_seeds:
            self._worker_seeds[self.epoch] = draw()
        return self._worker_seeds[self.epoch]

    def rank_state(self, own: Any, merge: Merge) -> PerRank:
        """Return this rank's position, and what `merge` makes of every rank's `own` values."""
        self._world.sample_counts.commit_void_steps()
        epoch, num_items = self.position
        value = [self._world.rank, epoch, num_items, self._worker_seeds.get(epoch), own]
        # As they are now: the state may be made of them when training has gone on.
        num_parts, stages = self.num_parts, self.stages
        return PerRank(value, lambda values: self._combined(values, merge, num_parts, stages))

    def gather(self, state: PerRank) -> dict[str, Any]:
        """Return the position of all ranks. Collective."""
        elastic = any(exchange.tolerates_loss for exchange in self._world.usage.exchanges)
        with self._world.waiting():
            found: dict[str, Any] = self._world.calls.call(
                "shard.state_dict", state.value, state.merge, elastic=elastic
            )
        return found

    def _combined(
        self, values: dict[int, Any], merge: Merge, num_parts: int, stages: Sequence[Stage]
    ) -> dict[str, Any]:
        """Return the state, from the values of all ranks of the transport. Called on one rank, for all."""
        # Where several ranks hold one replica, they have the same number in the data's world, and the same position.
        of_rank = {value[0]: value[1:] for value in values.values()}
        first = min(epoch for epoch, *_ in of_rank.values())
        # A lost rank cannot say how far it was: its epoch is taken as not begun.
        known = [of_rank.get(rank, [first, 0, None, None]) for rank in range(self._world.size)]
        positions = [[epoch, num_items] for epoch, num_items, *_ in known]
        return {
            **self._data,
            "num_parts": num_parts,
            "positions": positions,
            "stages": [_as_json(stage) for stage in stages if max(stage.epochs) >= first],
            "worker_seeds": [seed for _, _, seed, _ in known],
            **merge({rank: own for rank, (*_, own) in of_rank.items()}, positions),
        }

    def load_state_dict(self, state: Any) -> None:
        """Continue from the position of a world of any size. One that does not fit is refused, and changes nothing."""
        saved = SavedPosition.read(state, self._data)
        rank, num_saved = self._world.rank, len(saved.positions)
        # Steps of yet another number of ranks are not those of this world's batch size.
        same_world = num_saved == self._world.size and (self._keep == "global" or saved.num_parts == num_saved)
        self.stages, self.num_parts = saved.stages, saved.num_parts
        if same_world:
            position = saved.positions[rank]
        elif self._keep == "global" and len(set(saved.positions)) == 1:
            position = saved.positions[0]
        else:
            epochs, num_items = zip(*saved.positions, strict=True)
            self.stages += (Stage(self.num_parts, epochs, num_items),)
            self.num_parts = self._world.size
            position = (min(epochs), 0)
        self._go_to(position[0])
        self._committed = position
        seed = saved.worker_seeds[rank] if rank < num_saved and saved.positions[rank][0] == position[0] else None
        if seed is not None:
            self._worker_seeds[position[0]] = seed


def _as_json(stage: Stage) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(stage).items()}
