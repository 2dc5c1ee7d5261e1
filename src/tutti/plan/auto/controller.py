"""`PlanController`: times the steps of a job, plans from them, and checks whether the plan was right.

How it works. After every optimiser step the controller is in one of these states:

- *profiling*: a `ProfilingWindow` records steps. When it has enough, all ranks gather their records and plan. If the
  forward passes of some rank cannot be seen (a compiled model), all ranks stay with what they have, without a plan.
- *switch pending*: another strategy was chosen. `AutoExchange` takes it before the next forward pass. If a whole step
  passes without one, forward passes cannot be seen, and all ranks stay.
- *trial*: a new strategy is in use. After `TRIAL_STEPS` steps its measured step is compared with that of the strategy
  before it. If it is slower, it is refused, and the old one is pending again.
- *settled*: every `CHECK_EVERY` steps the measured step is compared with the prediction. `PATIENCE` checks in a row
  that are off by more than `TOLERANCE` start profiling again.

Ranks are in the same state in the same step: every transition depends on the number of steps, which is the same on all,
or on times that were gathered from all ranks.
"""

import statistics
import sys
from typing import Any

from tutti.cluster import format_time
from tutti.collectives import all_gather_json
from tutti.events import EXCHANGE, PULL, EventLog
from tutti.plan.auto.planner import JobPlanner
from tutti.plan.auto.profiling_window import ProfilingWindow
from tutti.plan.auto.status import PlanStatus
from tutti.plan.auto.step_recorder import factorable_layers
from tutti.plan.prediction import Prediction
from tutti.replica import HookedReplica
from tutti.strategies import Exchange, Strategy
from tutti.transports import Transport

TRIAL_STEPS = 12
"""Steps of a trial, at least; blocks of local steps have two blocks."""
SLOWER = 1.02
"""A strategy on trial is refused if its step takes this many times as long as that of the strategy before it."""
CHECK_EVERY = 50
"""Steps between two checks of the prediction."""
TOLERANCE = 0.25
"""Relative difference between measured and predicted step that a check accepts."""
PATIENCE = 2
"""Checks in a row that must fail before ranks plan again."""


class PlanController:
    """Decides, after each step of a job, whether to plan, to switch, or to leave things as they are."""

    def __init__(self, replica: HookedReplica, transport: Transport, events: EventLog, lossy: bool) -> None:
        self._replica, self._transport, self._events = replica, transport, events
        self._planner = JobPlanner(replica, transport, lossy)
        self._layers = factorable_layers(replica)
        self._window: ProfilingWindow | None = self._new_window()
        self._step_times: list[float] = []
        """Seconds of the latest steps under the strategy in use."""
        self._num_steps, self._num_failed_checks = 0, 0
        self._ended_s, self._waited_s = transport.now(), 0.0
        self.prediction: Prediction | None = None
        """The prediction of the strategy in use; None while there is no plan."""
        self.pending: tuple[Prediction, str] | None = None
        """The strategy to switch to before the next forward pass, and the message that is printed then."""
        self._previous: Prediction | None = None
        """During a trial: the strategy before it, with its measured step."""
        self._refused: set[Strategy] = set()
        """Strategies that were slower in a trial than the one before them."""

    def status(self, strategy: Strategy) -> PlanStatus:
        """Return the state of the plan, for `job.metrics`."""
        predicted_s = None if self.prediction is None else self.prediction.step_s
        settled = self._window is None and self.pending is None and self._previous is None
        step_s = statistics.median(self._step_times) if self._step_times else None
        return PlanStatus(str(strategy), predicted_s, step_s, settled)

    def take_pending(self) -> tuple[Prediction, str] | None:
        """Return the switch that is due, if there is one, and forget it: `pending` is None afterwards."""
        switch, self.pending = self.pending, None
        return switch

    def switched(self, prediction: Prediction, message: str) -> None:
        """Time steps anew after a switch that `take_pending` returned, and print its message."""
        self.prediction = prediction
        self._step_times.clear()  # They were steps of the strategy before.
        self._print(message)

    def step_ended(self, strategy: Strategy, exchange: Exchange) -> None:
        """Count a step that has ended under `strategy`, and decide. Collective in the steps in which it plans."""
        # First of all, because it waits for the GPU: only then has the step ended, and `now` is its end.
        if self._window is not None:
            self._window.record_step()
        now_s, waited_s = self._transport.now(), self._total_waiting_s()
        # The last `CHECK_EVERY` of them: those since the check before.
        self._step_times = [*self._step_times, now_s - self._ended_s][-CHECK_EVERY:]
        self._num_steps += 1
        if self.pending is not None:  # No forward pass was seen during a whole step.
            self._stay(strategy)
        elif self._window is not None:
            if self._window.step_ended(self._step_times[-1], waited_s - self._waited_s):
                self._plan(self._window, strategy, exchange)
        elif self._previous is not None and len(self._step_times) >= _trial_steps(strategy):
            self._judge(strategy, self._previous)
        elif self.prediction is not None and self._previous is None and self._num_steps % CHECK_EVERY == 0:
            self._check(self.prediction)
        # Planning takes time itself, which belongs to no step.
        self._ended_s, self._waited_s = self._transport.now(), self._total_waiting_s()

    def close(self) -> None:
        """Remove the hooks of the profiling window, if there is one."""
        if self._window is not None:
            self._window.close()

    def _new_window(self) -> ProfilingWindow:
        return ProfilingWindow(self._replica, self._transport, self._layers)

    def _total_waiting_s(self) -> float:
        # Waiting for an exchange is recorded as one of these two events.
        totals = self._events.totals
        return totals[EXCHANGE].seconds + totals[PULL].seconds

    def _plan(self, window: ProfilingWindow, strategy: Strategy, exchange: Exchange) -> None:
        """Plan from the recorded steps, if those of all ranks could be seen. Collective."""
        window.close()
        self._window = None
        summaries: list[dict[str, Any] | None] = all_gather_json(window.summary, self._transport)
        seen = [summary for summary in summaries if summary is not None]
        if len(seen) < len(summaries):  # All ranks see the same list, so all stay or none does.
            self._stay(strategy)
            return
        choice = self._planner.choose(seen, strategy, exchange, self.prediction, self._refused)
        if choice.switch:
            self.pending = choice.prediction, choice.message
            self._previous = choice.present
        else:
            self.prediction = choice.prediction
            self._print(choice.message)
        self._step_times.clear()

    def _judge(self, strategy: Strategy, previous: Prediction) -> None:
        """End a trial: back to the previous strategy if it was faster. Collective."""
        # A block's exchange is in one of many steps: only the mean counts it.
        average = statistics.median if strategy.steps_per_exchange == 1 else statistics.fmean
        # The first two steps may still allocate and connect.
        # The slowest rank counts, because the others wait for it.
        measured_s = max(all_gather_json(average(self._step_times[2:]), self._transport))
        self._previous = None
        if measured_s <= SLOWER * previous.step_s:
            return
        self._refused.add(strategy)  # The next plan would otherwise choose it again, by the same prediction.
        self.pending = (
            previous,
            f"{strategy} takes {format_time(measured_s)} a step, more than {previous.strategy} did: back to it, at "
            f"{format_time(previous.step_s)} a step",
        )

    def _check(self, prediction: Prediction) -> None:
        """Compare measured steps with the prediction; profile again if it was wrong for long. Collective."""
        # The median ignores single long steps, such as those that save a checkpoint.
        measured_s = max(all_gather_json(statistics.median(self._step_times), self._transport))
        error = abs(measured_s / prediction.step_s - 1) if prediction.step_s else 0.0
        self._num_failed_checks = self._num_failed_checks + 1 if error > TOLERANCE else 0
        if self._num_failed_checks >= PATIENCE:
            self._num_failed_checks = 0
            self._refused.clear()  # Conditions have changed: what was slower may be faster now.
            self._print(
                f"steps take {format_time(measured_s)}, not {format_time(prediction.step_s)} as was predicted: "
                "planning again"
            )
            self._window = self._new_window()

    def _stay(self, strategy: Strategy) -> None:
        """Stay with the strategy in use, without a plan: steps that are not seen cannot be timed."""
        self.pending = self._previous = self.prediction = None
        self._print(
            f"the model's forward passes cannot be seen, so it stays with {strategy}. If it is compiled, give "
            "tutti.distribute what torch.compile returned"
        )

    def _print(self, message: str) -> None:
        if self._transport.rank == 0:
            print(f"auto: {message}", file=sys.stderr)


def _trial_steps(strategy: Strategy) -> int:
    """Return the number of steps after which a strategy on trial is judged: two blocks, where it has blocks."""
    # Two more, because `_judge` leaves out the first two. Not more than `_step_times` holds, or a trial would not end.
    return min(CHECK_EVERY, max(TRIAL_STEPS, 2 * (strategy.steps_per_exchange or 1) + 2))
