"""Kills of workers while the others train on: what a loss costs, and whether the run ends where it would have ended.

How it works. Each run is a launch of its own, in real processes, on this machine or on the hosts of a lab. When all
workers have begun, a timer is started for each victim; at its end the worker gets SIGKILL. The timers' threads only
send signals. Between runs with kills come runs with other faults: cells of the matrix, drawn at random. Each run must
keep what `promises` says of its strategy and transport.

The time of a loss is that from the kill to the next step that all survivors have completed.
"""

import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from tutti.bench.elastic.matrix import Matrix, SeenRun, judge, lab_for, launch_run
from tutti.bench.elastic.promises import FAULTS, LAB, NOTHING, STRATEGIES, TRANSPORTS, WORKERS, Cell
from tutti.launch.elastic_run import ElasticRun
from tutti.launch.lab.lab import Lab

_EPOCHS, _PAUSE_S = 3, 0.002
_OTHER_FAULTS = ("stop", "exception", "leave", "join", "replace", "cut", "cut for a moment")
_OTHER_SHARE = 0.25
"""How many runs have another fault than kills."""


@dataclass
class LossOutcome:
    """What became of the runs of one strategy over one transport."""

    strategy: str
    transport: str
    kills: int = 0
    runs: int = 0
    others: int = 0
    """Runs with another fault than kills."""
    seconds: list[float] = field(default_factory=list)
    """From each kill to the next step of all survivors."""
    voided: int = 0
    """The most void steps of a worker, in place of one each loss."""
    problems: list[str] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        """Median time of a loss."""
        return statistics.median(self.seconds) if self.seconds else float("nan")

    @property
    def slowest_s(self) -> float:
        """Longest time of a loss."""
        return max(self.seconds, default=float("nan"))


def subjects(*, with_lab: bool) -> list[tuple[str, str]]:
    """All strategies over all transports; those of the lab only on request."""
    return [
        (strategy, transport) for strategy in STRATEGIES for transport in TRANSPORTS if with_lab or transport != LAB
    ]


QUICK = [("native", "shared_memory"), ("ring", "sockets")]


class _Killer:
    """Kills workers of one run some seconds after all have begun."""

    def __init__(self, plan: dict[int, float]) -> None:
        """Kill after the seconds in `plan`, by rank."""
        self._plan = plan
        self._pids: dict[int, int] = {}
        self._timers: list[threading.Timer] = []
        self.killed: dict[int, float] = {}
        """When workers were killed, on the machine's clock."""

    def watch(self, rank: int, values: dict[str, Any]) -> None:
        """Take in what a worker reports."""
        self._pids[rank] = values["pid"]
        if len(self._pids) == WORKERS:
            self._timers = [threading.Timer(after_s, self._kill, [victim]) for victim, after_s in self._plan.items()]
            for timer in self._timers:
                timer.start()

    def close(self) -> None:
        """Kill nobody any more."""
        for timer in self._timers:
            timer.cancel()
            timer.join()

    def _kill(self, rank: int) -> None:
        at = time.time()
        with suppress(ProcessLookupError):  # It has ended just now.
            os.kill(self._pids[rank], signal.SIGKILL)
            self.killed[rank] = at


def losses(
    num_kills: int,
    seed: int,
    chosen: Sequence[tuple[str, str]],
    *,
    done: Callable[[LossOutcome], None] = lambda outcome: None,
) -> list[LossOutcome]:
    """Kill workers of runs under each strategy over each transport: `num_kills` in all, one or two in a run."""
    draw, outcomes = random.Random(seed), [LossOutcome(*subject) for subject in chosen]
    with ExitStack() as stack:
        lab = stack.enter_context(lab_for([Cell(*subject, NOTHING) for subject in chosen]))
        matrix = Matrix(lab)
        wanted = launch_run(Cell("ring", "sockets", NOTHING), None, _EPOCHS, _PAUSE_S).ends[0]
        span_s = wanted.step_ends[-1] - wanted.step_ends[0]
        while sum(each.kills for each in outcomes) < num_kills:
            for outcome in outcomes:
                if draw.random() < _OTHER_SHARE:
                    _other(outcome, matrix, draw)
                victims = draw.sample(range(WORKERS), draw.choice((1, 2)))
                plan = {victim: draw.uniform(0, 0.95 * span_s) for victim in victims}
                _kill(outcome, plan, lab, wanted.parameters)
                done(outcome)
                if sum(each.kills for each in outcomes) >= num_kills:
                    break
    return outcomes


def _other(outcome: LossOutcome, matrix: Matrix, draw: random.Random) -> None:
    """Run a cell of the matrix."""
    possible = [each for each in _OTHER_FAULTS if outcome.transport == LAB or not FAULTS[each].only_lab]
    found = matrix.run(Cell(outcome.strategy, outcome.transport, draw.choice(possible)))
    outcome.others += 1
    outcome.problems += [f"{found.cell.fault}: {problem}" for problem in found.problems]


def _kill(outcome: LossOutcome, plan: dict[int, float], lab: Lab | None, wanted: list[float]) -> None:
    """Run with kills, and judge it."""
    killer, cell = _Killer(plan), Cell(outcome.strategy, outcome.transport, NOTHING)
    elastic = ElasticRun(minimum=1, maximum=WORKERS, restarts=0)
    try:
        seen = launch_run(cell, lab if cell.transport == LAB else None, _EPOCHS, _PAUSE_S, elastic, killer.watch)
    finally:
        killer.close()
    outcome.runs += 1
    outcome.kills += len(killer.killed)
    # A worker may be killed after its part is done, with its result.
    outcome.problems += judge(cell, seen, wanted, num_lost=len(killer.killed))
    outcome.voided = max([outcome.voided, *(each.voided_steps for each in seen.ends)])
    outcome.seconds += _times(seen, killer.killed)


def _times(seen: SeenRun, killed: dict[int, float]) -> list[float]:
    """Return the time from each kill to the next step of all survivors. None where they had no more steps to take."""
    times = []
    for at in killed.values():
        after = [min((end for end in result.step_ends if end > at), default=None) for result in seen.ends]
        if (ends := [end for end in after if end is not None]) and len(ends) == len(seen.ends):
            times.append(max(ends) - at)
    return times
