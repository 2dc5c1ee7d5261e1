"""`CommittedPosition`: how much of what a loop has got is in the model.

A position that a loop has come to waits here until the step that uses its item (`cursor.py`). In an elastic world there
is also a trail of the positions after each step. Only the thread of the training loop writes it, and nothing waits.
"""

from collections import deque

from tutti.data.trail import Trail
from tutti.world import World


class CommittedPosition:
    """The committed position of a rank, and those that its loop has come to since."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._position = (0, 0)
        self._pending: deque[tuple[int, int, int]] = deque()
        """Number of a batch among all that the world gave out, and the position once that batch is committed."""
        self.agreed = (0, 0)
        """The committed position at the last moment when what all ranks had done was in the model of each."""
        # Where ranks stay the same nobody asks for it.
        self._trail = None if world.elastic is None else Trail(self._position)
        self._first_step = world.sample_counts.num_steps
        """Steps of this process before those of the trail."""

    def follow(self, number: int | None, position: tuple[int, int]) -> None:
        """Record the position after a batch of this number; None for that of the batch before."""
        if number is None:
            number = self._pending[-1][0] if self._pending else 0
        self._pending.append((number, *position))

    def update(self) -> None:
        """Commit the batches that steps have used."""
        counts, pending = self._world.sample_counts, self._pending
        while pending and pending[0][0] <= counts.num_committed:
            self._position = pending.popleft()[1:]
        if self._trail is not None:
            self._trail.add(counts.num_steps - self._first_step, self._position)

    @property
    def position(self) -> tuple[int, int]:
        """Epoch of this rank, and the items of it that are committed."""
        self.update()
        return self._position

    @property
    def is_settled(self) -> bool:
        """Whether all that was given out is committed."""
        self.update()
        return not self._pending

    def go_to(self, position: tuple[int, int]) -> None:
        """Go on from a position; what was given out before is not waited for any more."""
        self._position = position
        self._pending.clear()

    def ranks_changed(self) -> None:
        """The position is one that all ranks have agreed on when they changed: the trail begins there."""
        self.agreed = self._position
        self._trail, self._first_step = Trail(self._position, self._trail), self._world.sample_counts.num_steps

    @property
    def trail(self) -> Trail:
        """The positions of this rank after each of its steps since ranks have changed."""
        self.update()
        assert self._trail is not None, "the ranks of this world stay the same"
        return self._trail
