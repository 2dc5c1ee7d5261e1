"""A few steps of a job, watched until there are enough to plan by."""

import statistics
from typing import Any

from torch import nn

from tutti.collectives import broadcast_json
from tutti.plan.auto.watch import Step, Watch, clock_for, summary
from tutti.replica import HookedReplica
from tutti.transports import Transport

FIRST_STEPS = 3
"""Before ranks agree on how many more are watched: the first may do more than others, and counts for nothing."""
WARM_UP_S, MOST_STEPS = 0.5, 20


class Survey:
    """Begins between two steps, on all ranks."""

    def __init__(self, replica: HookedReplica, transport: Transport, layers: dict[str, nn.Module]) -> None:
        self._transport = transport
        self._watch = Watch(replica, clock_for(replica, transport), layers)
        self._wanted, self._number = FIRST_STEPS, 0
        self._step = Step()
        self._steps: list[Step] = []
        self._walls: list[float] = []
        self._beside: list[float] = []
        """Of each step, what was neither computing nor waiting."""

    def settle(self) -> None:
        """A step has ended: wait for the GPU that takes it, if there is one."""
        self._step = self._watch.take()

    def stepped(self, wall_s: float, waited_s: float) -> bool:
        """Count the step that has ended; returns whether no more are wanted, alike on all ranks. Collective."""
        self._number += 1
        if self._number > 1:
            self._steps.append(self._step)
            self._walls.append(wall_s)
            self._step.forward_s = min(self._step.forward_s, wall_s)
            passes_s = self._step.forward_s + max(self._step.ready_s.values(), default=0.0)
            self._beside.append(max(0.0, wall_s - passes_s - waited_s))
        if self._number == FIRST_STEPS:
            more = int(WARM_UP_S / max(1e-9, wall_s))
            self._wanted = broadcast_json(FIRST_STEPS + min(more, MOST_STEPS - FIRST_STEPS), self._transport)
        return self._number >= self._wanted

    @property
    def seen(self) -> dict[str, Any] | None:
        """What `profile_of` reads and what a step took, "wall_s"; None if steps could not be seen."""
        if not all(step.seen for step in self._steps):
            return None
        return {**summary(self._steps, statistics.median(self._beside)), "wall_s": statistics.median(self._walls)}

    def end(self) -> None:
        """Let go of the model. Idempotent."""
        self._watch.detach()
