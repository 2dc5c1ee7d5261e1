"""`Cursor`: the position of a whole world in its data, which a checkpoint keeps.

How it works
------------
The data of an epoch is a sequence of *items*: batches of a DataLoader, samples of a dataset, whatever an iterable
gives. They are divided into columns, one per rank: in step k every rank takes the k-th item of its column.

An item is *given out* when the loop gets it, and *committed* when an optimiser of a distributed model has taken a step
afterwards. What a DataLoader has prefetched, and items whose gradients still accumulate, are not committed. Nobody
takes steps where no model is distributed, or gradients are disabled: there an item is committed when it is given out.

So there are two positions. The loop's is the epoch that is iterated over and the items given out in it. The committed
one follows it, at the next step: `CommittedPosition` has what is between them, as the position that each item leads to.
The end of an epoch, which the loop notices after the last item, is one more entry: the committed position leaves an
epoch only when all its items are committed. An epoch whose loop is left early stays the position until the next loop,
or `set_epoch`, gives up the rest of it.

The committed position of a rank is a pair: its epoch, and the committed items of its column. Under synchronous
strategies all ranks have the same pair; under asynchronous ones they may be apart, by epochs too. The pairs of all
ranks say which samples are used, in a few bytes, because the order of an epoch follows from its seed and number.

A world of another size continues in one of two ways:

- `keep="global"`: the steps stay what they were, and each is split between the ranks that are there now. `num_parts`
  remembers for how many ranks the steps were formed. The result is the one of the undisturbed run.
- `keep="local"`, or ranks that were apart: every rank keeps its batch size. What was used so far becomes a `Stage`: the
  items that it left over are divided anew. A run that changes its size several times in an epoch has several stages.

In an elastic world the ranks change while a loop is under way (`regroup`): the cursor then goes back to what is
committed, and the loop continues from there with the share of its new rank. Items that were given out and not committed
come again.

A lost rank may have been behind, also by epochs. So there are two numbers: `epoch`, from which items are given out, and
`loop_epoch`, which loops count. They differ after a change only. A loop then goes through what is left of the earlier
epochs first, and through its own epoch last. A trail (`trail.py`) has the position after each step since ranks have
changed last: from it follows how far a lost rank was, of which the others know the steps.

Only the thread of the training loop writes a cursor. Nothing here waits but `gather`, a collective call.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from tutti.data.committed import CommittedPosition
from tutti.data.saved_position import SavedPosition, differences
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
    num_items: int | None = None
    """Items of this rank in the epoch, or in what is left of it, where that is known before its end."""


class Cursor:
    """The position of this rank, and what is known of the world's earlier stages."""

    def __init__(self, world: World, keep: Keep, data: dict[str, Any], split_batches: bool = False) -> None:
        """Start at the beginning.

        Args:
            data: describes the data: a state of other data is refused.
            split_batches: whether every step is one batch, formed as for a single rank, and split between the ranks.
        """
        self.world = world
        self.keep = keep
        self._data = data
        self._split_batches = split_batches
        self.num_parts = 1 if split_batches else world.size
        """Number of ranks for which steps are formed."""
        self.stages: tuple[Stage, ...] = ()
        self.epoch = 0
        """Number of the epoch whose items are given out, or come next."""
        self.loop_epoch = 0
        """Number of the epoch as loops count: `epoch`, or a later one while something is left of earlier epochs."""
        self.committed = CommittedPosition(world)
        self._iteration: Iteration | None = None
        """The loop under way."""
        self._worker_seeds: dict[int, int] = {}
        """Seeds of DataLoader workers in epochs that have begun."""
        self.num_regroupings = 0
        """How often the ranks have changed: a loop that began before gives out nothing more."""

    def start(self) -> Iteration:
        """Start a loop. If the one before was left before its end, the rest of its epoch is given up."""
        if self._iteration is not None:
            self._go_to(self.loop_epoch + 1, 0)
        epoch, num_items = self.position
        first = num_items if epoch == self.epoch else 0
        self._iteration = Iteration(self.epoch, first, first)
        return self._iteration

    def goes_on(self, loop_epoch: int) -> bool:
        """Whether a loop has something left, of its own epoch or an earlier one, and no other loop has begun."""
        return self._iteration is None and self.epoch <= loop_epoch

    @property
    def is_iterated(self) -> bool:
        """Whether a loop is under way."""
        return self._iteration is not None

    def is_end(self, epoch: int, num_items: int) -> bool:
        """Whether this is the end of the epoch that a loop is in."""
        current = self._iteration
        return current is not None and (epoch, num_items) == (current.epoch, current.num_items)

    def give_out(self, iteration: Iteration) -> None:
        """Record that a loop gets an item, after `SampleCounts.record_batch`."""
        iteration.num_given_out += 1
        if iteration is not self._iteration:
            return  # Another loop over the same data has begun since.
        self.committed.update()  # Here too, so that those that wait are few, however long no state is asked for.
        counts = self.world.sample_counts
        # 0 where no step will follow: the item is committed as soon as those before it are.
        number = counts.num_batches if torch.is_grad_enabled() and counts.distributed else 0
        self.committed.follow(number, (iteration.epoch, iteration.num_given_out))

    def end(self, iteration: Iteration) -> None:
        """Record that a loop came to the end of its epoch: the next one follows."""
        if iteration is self._iteration:
            self.epoch += 1
            self.loop_epoch = max(self.loop_epoch, self.epoch)
            self._iteration = None
            self.committed.follow(None, (self.epoch, 0))

    @property
    def position(self) -> tuple[int, int]:
        """Epoch of this rank, and the items of it that are committed."""
        return self.committed.position

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; the one that comes next anyway keeps its position."""
        if epoch != self.loop_epoch or self._iteration is not None:
            self._go_to(epoch, 0)

    def _go_to(self, epoch: int, num_items: int) -> None:
        self.epoch = self.loop_epoch = epoch
        self.committed.go_to((epoch, num_items))
        self._iteration = None
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

    def differences(self, state: dict[str, Any]) -> str:
        """Describe how the data of a state differs from this; nothing if it is the same."""
        return differences(state, self._data)

    def regroup(self, positions: list[list[int]]) -> None:
        """Continue as another rank of another number of ranks, from the positions of the ranks that were there."""
        seeds, loop_epoch = dict(self._worker_seeds), self.loop_epoch
        first = min(epoch for epoch, _ in positions)
        self.stages = tuple(stage for stage in self.stages if max(stage.epochs) >= first)
        self._continue(tuple((epoch, steps) for epoch, steps in positions), together=True)
        self._worker_seeds.update(seeds)  # Of this rank's own workers, whose epoch goes on.
        self.loop_epoch = max(loop_epoch, self.epoch)
        self.changed()

    def changed(self) -> None:
        """The position is one that was agreed on when ranks changed: loops that are under way continue from it."""
        self.committed.ranks_changed()
        self.num_regroupings += 1

    def export(self) -> dict[str, Any]:
        """Return the position as a state that a new rank of this world can load."""
        return {
            **self._data,
            "num_parts": self.num_parts,
            "positions": [list(self.position)] * self.world.size,
            "loop_epoch": self.loop_epoch,
            "stages": [_as_json(stage) for stage in self.stages],
            "worker_seeds": [None] * self.world.size,
        }

    def rank_state(self, own: Any, merge: Merge) -> PerRank:
        """Return this rank's position, and what `merge` makes of every rank's `own` values."""
        self.world.sample_counts.commit_void_steps()
        epoch, num_items = self.position
        value = [self.world.rank, epoch, num_items, self._worker_seeds.get(epoch), own]
        # As they are now: the state may be made of them when training has gone on.
        num_parts, stages = self.num_parts, self.stages
        return PerRank(value, lambda values: self._combined(values, merge, num_parts, stages))

    def gather(self, own: Callable[[], PerRank]) -> dict[str, Any]:
        """Return the position of all ranks. Collective.

        Args:
            own: returns `rank_state`; again if ranks have changed meanwhile, as that has the number of this rank.
        """

        def gathered() -> Any:
            elastic, state = any(exchange.tolerates_loss for exchange in self.world.usage.exchanges), own()
            return self.world.calls.call("shard.state_dict", state.value, state.merge, elastic=elastic)

        with self.world.waiting():
            found: dict[str, Any] = self.world.collective(gathered, same_answer=True)
        return found

    def _combined(
        self, values: dict[int, Any], merge: Merge, num_parts: int, stages: Sequence[Stage]
    ) -> dict[str, Any]:
        """Return the state, from the values of all ranks of the transport. Called on one rank, for all."""
        # Where several ranks hold one replica, they have the same number in the data's world, and the same position.
        of_rank = {value[0]: value[1:] for value in values.values()}
        first = min(epoch for epoch, *_ in of_rank.values())
        # A lost rank cannot say how far it was: its epoch is taken as not begun.
        known = [of_rank.get(rank, [first, 0, None, None]) for rank in range(self.world.size)]
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
        self.stages, self.num_parts = saved.stages, saved.num_parts
        position = self._continue(saved.positions, together=False)
        self.loop_epoch = max(saved.loop_epoch, position[0])
        rank = self.world.rank
        known = rank < len(saved.positions) and saved.positions[rank][0] == position[0]
        if known and (seed := saved.worker_seeds[rank]) is not None:
            self._worker_seeds[position[0]] = seed

    def _continue(self, positions: tuple[tuple[int, int], ...], together: bool) -> tuple[int, int]:
        """Go to where this rank continues from the positions of the ranks that were there; return it.

        Args:
            together: whether all ranks have as many steps left, also if the others were apart.
        """
        num_before, are_equal = len(positions), len(set(positions)) == 1
        # Steps of yet another number of ranks are not those of this world's batch size.
        same_world = num_before == self.world.size and (self.keep == "global" or self.num_parts == num_before)
        if same_world and (are_equal or not together):
            position = positions[self.world.rank]
        elif self.keep == "global" and are_equal:
            position = positions[0]
        else:
            epochs, num_items = zip(*positions, strict=True)
            self.stages += (Stage(self.num_parts, epochs, num_items),)
            self.num_parts = 1 if self._split_batches else self.world.size
            position = (min(epochs), 0)
        self._go_to(*position)
        return position


def _as_json(stage: Stage) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(stage).items()}
