"""`Trail`: the positions of a rank in its data after each of its steps, in a few numbers.

How it works
------------
A rank that is lost cannot say how far it was. What the others know is how many of its steps are in the model. The
columns of all ranks of a generation have the same length, and all of them run the same loop. So after c steps the lost
rank was where any other rank was after its own c-th step.

Steps advance by the same number of items nearly always: a trail is a list of *runs*, each an arithmetic progression,
and grows by one run per epoch. Behind its end the last run is continued. Where steps use numbers of batches that change
all the time, there is a run for each, and only the newest runs are kept: a rank that was lost before them is taken to
have come to the first of them, so that no sample is used twice.
"""

from bisect import bisect_left
from dataclasses import dataclass

_MOST_RUNS = 64
"""How many runs are kept, the newest: a lost rank is not that many epochs behind."""


@dataclass
class _Run:
    """Entries at equal distances, within one epoch."""

    step: int
    """Number of steps of the first entry."""
    epoch: int
    num_items: int
    """Committed items of the first entry."""
    count: int = 1
    step_stride: int = 1
    item_stride: int = 1

    @property
    def last_step(self) -> int:
        return self.step + (self.count - 1) * self.step_stride

    def follow(self, step: int, position: tuple[int, int]) -> "_Run":
        """Return the next run, which advances as this one until it is known how it does."""
        return _Run(step, *position, 1, self.step_stride, self.item_stride)

    def position(self, number: int) -> tuple[int, int]:
        """Return the position of an entry, counted from the first."""
        return self.epoch, self.num_items + number * self.item_stride


class Trail:
    """Positions after numbers of steps, which increase."""

    def __init__(self, position: tuple[int, int], before: "Trail | None" = None) -> None:
        """Start at a position, after no step; `before` is the trail of the same loop until then."""
        self._runs: list[_Run] = [_Run(0, *position) if before is None else before._runs[-1].follow(0, position)]

    @property
    def num_steps(self) -> int:
        """Number of steps at its end."""
        return self._runs[-1].last_step

    def add(self, step: int, position: tuple[int, int]) -> None:
        """Record the position after `step` steps: that of the last entry, if it has as many."""
        last = self._runs[-1]
        if last.last_step == step:
            if last.position(last.count - 1) == position:
                return
            last.count -= 1
            if not last.count:
                self._runs.pop()
            self._begin_run(last.follow(step, position))
            return
        step_stride, item_stride = step - last.last_step, position[1] - last.position(last.count - 1)[1]
        if position[0] != last.epoch:
            self._begin_run(last.follow(step, position))
        elif last.count == 1:
            last.count, last.step_stride, last.item_stride = 2, step_stride, item_stride
        elif (step_stride, item_stride) == (last.step_stride, last.item_stride):
            last.count += 1
        else:
            self._begin_run(last.follow(step, position))

    def _begin_run(self, run: _Run) -> None:
        self._runs.append(run)
        del self._runs[:-_MOST_RUNS]

    def after(self, num_steps: int) -> tuple[int, int]:
        """Return the position after a number of steps; behind the end, as if the epoch went on."""
        index = bisect_left(self._runs, num_steps, key=lambda run: run.last_step)
        if index == len(self._runs):
            return self._continued(num_steps)
        run = self._runs[index]
        # Between two entries it is that of the later: the batch was used by the first step after it was drawn.
        return run.position(max(0, -(-(num_steps - run.step) // run.step_stride)))

    def _continued(self, num_steps: int) -> tuple[int, int]:
        last = self._runs[-1]
        epoch, num_items = last.position(last.count - 1)
        return epoch, num_items + -(-(num_steps - last.last_step) * last.item_stride // last.step_stride)

    def export(self) -> list[list[int]]:
        """Return its runs, as values that can be sent."""
        return [[run.step, run.epoch, run.num_items, run.count, run.step_stride, run.item_stride] for run in self._runs]

    @classmethod
    def read(cls, runs: list[list[int]]) -> "Trail":
        """Return the trail that another rank has exported."""
        trail = cls((0, 0))
        trail._runs = [_Run(*run) for run in runs]
        return trail
