"""Schedule of checkpoints: every so many steps, every so long, or because a process was asked to stop.

How it works. All ranks must take a checkpoint together, so all must come to the same decision.

- Every N steps, in the first call after each multiple of N: each rank sees that by its own count, which is the same on
  all under synchronous strategies. Under others it need not be: a rank that is there first waits for the rest.
- By time, synchronous strategies: clocks of ranks would disagree about the step in which the time is over. So ranks
  compare their clocks in a collective call, about once a second. The first rank's counts, and so does a request to
  stop on any rank. The answer also says after how many calls to compare again. It is the same on all ranks, so no rank
  waits for one that does not come.
- By time, other strategies: the same, but ranks must not wait for each other every second. They compare when the time
  is likely to be over, by the calls that the time before took: once for each checkpoint, and a few times before the
  first. All ranks come to that call, whenever they do; by clocks of their own, one could find the time over in its last
  step and wait for others that have ended. A rank that is asked to stop waits for the others, which launchers and
  schedulers ask as well.
"""

from collections.abc import Mapping
from math import inf
from typing import Any

from tutti.checkpoint.interval import Every, parse_every
from tutti.job.checkpoints.snapshot import Call
from tutti.job.checkpoints.stop_requests import stop_requested
from tutti.world import World

_COMPARE_S = 1.0
"""About how often ranks compare their clocks: what a request to stop has to wait at most, beside a step."""

_EARLY = 0.9
"""The part of the time after which a checkpoint is taken, where ranks compare their clocks only once for each."""


class CheckpointSchedule:
    """Decides in every call of `job.checkpoint` whether a checkpoint is due."""

    def __init__(self, every: Every, world: World, synchronous: bool, call: Call, written: int) -> None:
        """`written` is the step from which the run continues, which is saved already; -1 if there is none."""
        period = parse_every(every)
        self._every = str(every)
        self._num_steps = period if isinstance(period, int) else None
        self._period_s = period if isinstance(period, float) else None
        self._world = world
        self._synchronous, self._call = synchronous, call
        self._since_s = self._compared_s = world.transport.now()
        self._written_step = max(0, written)
        """The step of the last checkpoint: it is not written twice."""
        self._num_calls, self._next_call = 0, 1
        """Calls since ranks last compared their clocks, and at which call they do so again."""

    def due(self, steps: int) -> bool:
        """Whether ranks take a checkpoint after `steps` steps. Collective at times."""
        by_steps = self._num_steps is not None and steps // self._num_steps > self._written_step // self._num_steps
        self._num_calls += 1
        # Under other strategies ranks that train by steps need no comparison.
        compares = self._synchronous or self._period_s is not None
        # A rank that is asked to stop compares at once: others may be in that call already, and in no other.
        asked = not self._synchronous and bool(stop_requested(self._world))
        if not compares:
            return by_steps or asked
        if self._num_calls < self._next_call and not asked:
            return by_steps
        answer = self._compare()
        self._next_call = answer["next"]
        return by_steps or bool(answer["now"])

    def written(self, steps: int) -> None:
        """Start anew, after all ranks have taken a checkpoint together."""
        self._since_s, self._written_step = self._world.transport.now(), steps

    def export(self) -> dict[str, Any]:
        """Return where the schedule is, for a rank that joins this one."""
        now_s = self._world.transport.now()
        return {
            "since_s": now_s - self._since_s,
            "compared_s": now_s - self._compared_s,
            "written": self._written_step,
            "calls": self._num_calls,
            "next": self._next_call,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from what `export` returned on another rank."""
        now_s = self._world.transport.now()
        self._since_s, self._compared_s = now_s - state["since_s"], now_s - state["compared_s"]
        self._written_step, self._num_calls, self._next_call = state["written"], state["calls"], state["next"]

    def _compare(self) -> dict[str, Any]:
        now_s = self._world.transport.now()
        report = {
            "age_s": now_s - self._since_s,
            "call_s": (now_s - self._compared_s) / self._num_calls,
            "calls": self._num_calls,
            "stop": bool(stop_requested(self._world)),
        }
        self._compared_s, self._num_calls = now_s, 0
        name = f"job.checkpoint(every={self._every!r})"
        answer: dict[str, Any] = self._call(name, report, self._agree)
        return answer

    def _agree(self, reports: Mapping[int, Any]) -> dict[str, Any]:
        """Make one answer of what all ranks report."""
        first = reports[min(reports)]
        left_s, late, most = _COMPARE_S if self._synchronous else inf, False, 2.0 * first["calls"]
        if self._period_s is not None:
            late = first["age_s"] >= self._period_s * (1.0 if self._synchronous else _EARLY)
            left_s = min(left_s, self._period_s if late else self._period_s - first["age_s"])
            if late and not self._synchronous:
                most = inf
        return {
            "now": late or any(report["stop"] for report in reports.values()),
            # At most twice as many as before: the first times say little about the later ones.
            "next": max(1, int(min(most, left_s / max(first["call_s"], 1e-9)))),
        }


class Schedules:
    """The schedules of a job, by folder and interval."""

    def __init__(self) -> None:
        self._schedules: dict[tuple[str, str], CheckpointSchedule] = {}
        self._inherited: dict[tuple[str, str], dict[str, Any]] = {}
        """Schedules received from other ranks, on a rank that has joined, until its loop reaches them."""

    def get(self, run: str, every: Every) -> CheckpointSchedule | None:
        """Return a schedule; None if the loop comes to it for the first time."""
        return self._schedules.get((run, str(every)))

    def add(self, run: str, every: Every, schedule: CheckpointSchedule) -> bool:
        """Keep a schedule; return whether it continues that of other ranks, which this one has joined."""
        key = run, str(every)
        self._schedules[key] = schedule
        if (state := self._inherited.pop(key, None)) is not None:
            schedule.load(state)
        return state is not None

    def export(self) -> list[list[Any]]:
        """Return when checkpoints are due, for a rank that takes over the state of this one."""
        return [[*key, schedule.export()] for key, schedule in self._schedules.items()]

    def take_over(self, states: list[list[Any]]) -> None:
        """Continue from what `export` returned on another rank."""
        for run, every, state in states:
            if (schedule := self._schedules.get((run, every))) is not None:
                schedule.load(state)
            else:
                self._inherited[run, every] = state
