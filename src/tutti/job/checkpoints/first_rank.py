"""The state of a whole run in one collective call, where rank 0 holds what all ranks agree on (`agreed_on_first`).

How it works. No other rank changes the model of rank 0 then, so nobody has to wait for its copy:

1. Every rank collects what it alone has: random states, its position in the data, what its codec has not sent yet.
   Rank 0 also takes the rest of the state apart, where a value that cannot be stored is found.
2. One call. In it ranks agree whether a checkpoint is taken, and rank 0 gets the values of all, as bytes. A mistake of
   any rank is an error on all of them.
3. Rank 0 copies its tensors and gives the copy to its writer, whose thread makes the state of the ranks' values. The
   others train on meanwhile.

Strategies of this kind need every rank: a lost one ends the job, before the call is answered or in the next step. So
nobody can follow rank 0 as the one that writes, and its copy is one of all ranks or of none.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tutti.checkpoint.copies import Layout
from tutti.checkpoint.snapshots import Snapshot, TakenApart, ValuePath
from tutti.checkpoint.tree import encode
from tutti.collectives.packing import from_bytes, to_bytes
from tutti.data.sharded_data import ShardedData
from tutti.job.checkpoints.random_state import RandomStates
from tutti.job.state import exchange_state, parameter_shapes
from tutti.strategies.saved_state import PerRank, merged_marks, without_marks
from tutti.world import World

if TYPE_CHECKING:
    from tutti.job.handle import Job


class FirstRankState:
    """The state of a run as one rank has it between two steps."""

    def __init__(self, job: "Job", world: World, parts: Mapping[str, Any], extra: dict[str, Any]) -> None:
        """Collect it. Collective where a part's `state_dict` is.

        Args:
            parts: what the loop has besides the job, by name.
            extra: values of the user's own.
        """
        self._job, self._rank, self._size = job, world.rank, world.size
        self._random = RandomStates()
        self._positions: dict[ValuePath, PerRank] = {}
        """Positions in data, by their place in the state. What they refer to stays as it is."""
        states: dict[str, Any] = {}
        for name, part in parts.items():
            # Data is in the same call as all else, where it can be. Others are asked on all ranks, as anywhere.
            mark = part.rank_state(world) if isinstance(part, ShardedData) else None
            if mark is None:
                states[name] = part.state_dict()
            else:
                self._positions["parts", name] = mark
        exchange, marks = without_marks(exchange_state(job._replica, job._exchange))
        self._unsent: dict[ValuePath, PerRank] = {("job", "exchange", *path): mark for path, mark in marks.items()}
        """What the strategy has on each rank, likewise. Training goes on to change it."""
        described = {"strategy": str(job.strategy), "steps": job.steps, "exchange": exchange}
        self._state = {"extra": extra, "parts": states, "job": described}
        self._gathered: dict[int, Tensor] = {}
        self._own_unsent: list[Any] = []

    def packed(self) -> Tensor:
        """Return what this rank sends to rank 0. Raises `ConfigError` for a value that cannot be sent."""
        marks = (*self._positions.values(), *self._unsent.values())
        return to_bytes([self._random.values(), *(mark.value for mark in marks)])

    def gather(self, packed: Mapping[int, Tensor]) -> None:
        """Keep what the other ranks have sent to this one, which is rank 0."""
        self._gathered = dict(packed)

    def taken_apart(self, known_layout: Layout | None) -> TakenApart:
        """Take the state of rank 0 apart. Raises `CheckpointError` for a value that cannot be stored."""
        job = self._job
        snapshot = Snapshot(
            steps=job.steps,
            model=job._model.state_dict(),
            optimizer=job._replica.optimizer.state_dict(),
            state=self._state,
            strategy=self._state["job"]["strategy"],
            world_size=self._size,
        )
        if known_layout is None:
            encode([mark.value for mark in self._positions.values()], "parts")
        if self._unsent:
            self._own_unsent = from_bytes(to_bytes([mark.value for mark in self._unsent.values()]))
        return TakenApart(snapshot, known_layout)

    def gathered(self) -> dict[ValuePath, Any]:
        """Return what is made of the values of all ranks, by place. Called by the thread that writes."""
        values = {rank: from_bytes(packed) for rank, packed in self._gathered.items()}
        positions = [mark.value for mark in self._positions.values()]
        values[self._rank] = [self._random.values(), *positions, *self._own_unsent]
        size = self._size
        marks = {
            ("random",): PerRank(None, lambda values: [values.get(rank) for rank in range(size)]),
            **self._positions,
            **self._unsent,
        }
        shapes = {("job", "parameters"): parameter_shapes(self._job._replica, None)}
        return shapes | dict(zip(marks, merged_marks(list(marks.values()), values), strict=True))
