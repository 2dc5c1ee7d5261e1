"""Kills of workers while the others train on: what a loss costs, and whether the run ends where it would have ended.

How it works. Each run is a launch of its own, in real processes. When all workers have begun, a timer is started for
each victim; at its end the worker gets SIGKILL. The timers' threads only send signals. A run without kills, at the
same seed, is the one that others are compared with: exact strategies must end within 1e-10 of its parameters, and all
workers of a run with the same ones. Every sample of every epoch must be used once.

The time of a loss is that from the kill to the next step that all survivors have completed.
"""

import io
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tutti.bench.elastic.training import ElasticResult, ElasticSettings, misused, train
from tutti.errors import WorkerFailed
from tutti.launch.control_settings import ELASTIC
from tutti.launch.local import supervise

_EPOCHS, _PAUSE_S = 3, 0.002
_TOLERANCE = 1e-10
"""Largest difference of parameters under an exact strategy, relative to the largest."""


@dataclass(frozen=True)
class ElasticSubject:
    """A strategy whose workers are killed."""

    strategy: str
    transport: str
    exact: bool = False
    """Whether the result is that of the undisturbed run."""


SUBJECTS = (
    ElasticSubject("native", "shared_memory", exact=True),
    ElasticSubject("ring", "sockets", exact=True),
    ElasticSubject("poseidon", "sockets", exact=True),
    ElasticSubject("onebit:exact_below=0", "sockets"),
    ElasticSubject("onebit:exact_below=0", "shared_memory"),
)
QUICK = SUBJECTS[:2]


@dataclass
class LossOutcome:
    """What became of the runs of one strategy."""

    strategy: str
    transport: str
    kills: int = 0
    runs: int = 0
    seconds: list[float] = field(default_factory=list)
    """From each kill to the next step of all survivors."""
    misused: int = 0
    """Samples that were not used exactly once."""
    different: int = 0
    """Runs that did not end as they should."""
    largest_difference: float = 0.0
    """Of parameters from those of the undisturbed run."""
    problems: list[str] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        """Median time of a loss."""
        return statistics.median(self.seconds) if self.seconds else float("nan")

    @property
    def slowest_s(self) -> float:
        """Longest time of a loss."""
        return max(self.seconds, default=float("nan"))

    @property
    def right(self) -> bool:
        """Whether nothing went wrong."""
        return not (self.misused or self.different or self.problems)


@dataclass
class _KilledRun:
    """One launch, and the kills in it."""

    settings: ElasticSettings
    workers: int
    plan: dict[int, float]
    """Seconds after the start at which workers are killed, by rank."""
    pids: dict[int, int] = field(default_factory=dict)
    killed: dict[int, float] = field(default_factory=dict)
    """When workers were killed, on the machine's clock."""
    results: list[ElasticResult | None] | None = None
    error: str = ""

    def execute(self, transport: str) -> None:
        """Launch the workers, and wait for their end."""
        timers: list[threading.Timer] = []

        def watch(rank: int, values: dict[str, Any]) -> None:
            self.pids[rank] = values["pid"]
            if len(self.pids) == self.workers:
                timers.extend(threading.Timer(after_s, self._kill, [victim]) for victim, after_s in self.plan.items())
                for timer in timers:
                    timer.start()

        environment = {"TUTTI_TRANSPORT": transport, ELASTIC: f"1:{self.workers}"}
        said = io.StringIO()
        try:
            with redirect_stderr(said):
                self.results = supervise(train, (self.settings,), self.workers, environment, watch).run()
        except WorkerFailed as failed:
            self.error = f"{failed}\n{said.getvalue()[-1000:]}"
        finally:
            for timer in timers:
                timer.cancel()
                timer.join()

    def _kill(self, rank: int) -> None:
        with suppress(ProcessLookupError):  # It has ended just now.
            self.killed[rank] = time.time()
            os.kill(self.pids[rank], signal.SIGKILL)


def losses(
    num_kills: int,
    seed: int,
    subjects: Sequence[ElasticSubject] = SUBJECTS,
    *,
    workers: int = 4,
    done: Callable[[LossOutcome], None] = lambda outcome: None,
) -> list[LossOutcome]:
    """Kill workers of runs under each strategy: `num_kills` in all, one or two in a run."""
    draw = random.Random(seed)
    outcomes = []
    for subject in subjects:
        outcome = LossOutcome(subject.strategy, subject.transport)
        undisturbed = _execute(subject, workers, {})
        if undisturbed.results is None or undisturbed.results[0] is None:
            raise RuntimeError(f"an undisturbed run under {subject.strategy} failed: {undisturbed.error}")
        wanted = undisturbed.results[0]
        span_s = wanted.step_ends[-1] - wanted.step_ends[0]
        while outcome.kills < num_kills / len(subjects):
            victims = draw.sample(range(workers), draw.choice((1, 2)))
            run = _execute(subject, workers, {victim: draw.uniform(0, 0.95 * span_s) for victim in victims}, outcome)
            outcome.runs += 1
            outcome.kills += len(run.killed)
            _judge(outcome, run, wanted, subject)
            done(outcome)
        outcomes.append(outcome)
    return outcomes


def _execute(
    subject: ElasticSubject, workers: int, plan: dict[int, float], outcome: LossOutcome | None = None
) -> _KilledRun:
    with tempfile.TemporaryDirectory(prefix="tutti-elastic-") as folder:
        run = _KilledRun(ElasticSettings(subject.strategy, folder, _EPOCHS, _PAUSE_S), workers, plan)
        run.execute(subject.transport)
        if outcome is not None and not run.error:
            outcome.misused += misused(Path(folder), _EPOCHS)
    return run


def _judge(outcome: LossOutcome, run: _KilledRun, wanted: ElasticResult, subject: ElasticSubject) -> None:
    """Compare the end of a run with that of the undisturbed one, and take the times of its losses."""
    left = [result for result in run.results or () if result is not None]
    if run.error or not left:
        outcome.problems.append(run.error or "no worker has come to the end")
        return
    largest = max(map(abs, wanted.parameters))
    for result in left:
        pairs = zip(result.parameters, wanted.parameters, strict=True)
        difference = max(abs(got - want) for got, want in pairs) / largest
        outcome.largest_difference = max(outcome.largest_difference, difference)
        same = result.parameters == left[0].parameters and result.learning_rate == wanted.learning_rate
        if not same or result.steps != wanted.steps or (subject.exact and difference > _TOLERANCE):
            outcome.different += 1
            outcome.problems.append(f"{result.steps} steps of {wanted.steps}, parameters differ by {difference}")
            break
    for at in run.killed.values():
        after = [min((end for end in result.step_ends if end > at), default=None) for result in left]
        if (ends := [end for end in after if end is not None]) and len(ends) == len(left):
            outcome.seconds.append(max(ends) - at)
