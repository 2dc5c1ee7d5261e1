"""`ProfilingWindow`: records a few steps of a job, until there are enough to plan from."""

import statistics
from typing import Any

from torch import nn

from tutti.collectives import broadcast_json
from tutti.measurement import Spread
from tutti.plan.auto.step_recorder import RecordedStep, StepRecorder, clock_for, summarise
from tutti.replica import HookedReplica
from tutti.transports import Transport

FIRST_STEPS = 3
"""Steps before ranks agree on the length of the window. The first may do more than others and is not counted."""
WINDOW_S, MAX_STEPS = 0.5, 20
"""Length of the window in seconds, about, and at most in steps."""


class ProfilingWindow:
    """Records steps from its creation, which is between two steps and on all ranks, until `close`."""

    def __init__(self, replica: HookedReplica, transport: Transport, layers: dict[str, nn.Module]) -> None:
        self._transport = transport
        self._recorder = StepRecorder(replica, clock_for(replica, transport), layers)
        self._num_wanted, self._num_steps = FIRST_STEPS, 0
        self._step = RecordedStep()
        self._steps: list[RecordedStep] = []
        self._step_times: list[float] = []
        self._rest_times: list[float] = []
        """Seconds of each step that were neither forward, backward nor waiting: the optimiser and the data."""

    def record_step(self) -> None:
        """Take the record of the step that has ended; waits for the GPU that computes it, if there is one."""
        self._step = self._recorder.take()

    def step_ended(self, step_s: float, waited_s: float) -> bool:
        """Count the recorded step; return whether the window is complete, the same on all ranks. Collective."""
        self._num_steps += 1
        if self._num_steps > 1:  # The first step allocates, and may compile and connect.
            self._steps.append(self._step)
            self._step_times.append(step_s)
            self._step.forward_s = min(self._step.forward_s, step_s)
            # Backward ends with its last gradient. Waiting for the exchange is what the planner predicts: leave it out.
            passes_s = self._step.forward_s + max(self._step.ready_s.values(), default=0.0)
            self._rest_times.append(max(0.0, step_s - passes_s - waited_s))
        if self._num_steps == FIRST_STEPS:
            # Rank 0 decides, because step times differ a little and all ranks must end the window in the same step.
            more = int(WINDOW_S / max(1e-9, step_s))
            self._num_wanted = broadcast_json(FIRST_STEPS + min(more, MAX_STEPS - FIRST_STEPS), self._transport)
        return self._num_steps >= self._num_wanted

    @property
    def summary(self) -> dict[str, Any] | None:
        """The input of `profile_from_summary`; None if no hook was called.

        Also "wall_s", the median step in seconds, and "doubt", why it should not be trusted.
        """
        if not all(step.complete for step in self._steps):
            return None
        return {
            **summarise(self._steps, statistics.median(self._rest_times)),
            "wall_s": statistics.median(self._step_times),
            # Steps of a simulation differ as its cluster says, which is no error.
            "doubt": Spread.of(self._step_times).doubt if self._transport.cluster is None else "",
        }

    def close(self) -> None:
        """Remove the hooks from the model. Idempotent."""
        self._recorder.detach()
