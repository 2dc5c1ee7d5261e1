"""Kills: training runs are killed at random moments and continued, until they reach their end.

How it works. Each attempt of a run is a launch of its own, in real processes that the fork server makes. When all
workers have reported their process numbers, a timer is started; at its end, SIGKILL goes to all of them at once or to
one, upon which the launcher ends the others. The timer's thread only sends signals; everything else happens in the
thread that called `storm`.

After every kill all checkpoints that a reader would find must be complete, and the newest must be as new as after the
kill before. At the end of a run, its committed steps must have used every sample of every epoch exactly once, and its
parameters are compared with those of a run that nobody disturbed:

- strategies whose result is determined by their input: the same bits on the same number of workers;
- exact strategies: within 1e-10 if the number of workers changed between attempts;
- asynchronous strategies: the loss of every run lies within the range of several undisturbed runs, widened by its
  width, or by half of its median if that is more.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tutti.bench.checkpoints.records import misused
from tutti.bench.checkpoints.training import NUM_SAMPLES, Result, RunSettings, train
from tutti.checkpoint.index import candidates, verify
from tutti.errors import WorkerFailed
from tutti.launch.local import supervise

_WORKERS = 2
_OTHER_WORKERS = (2, 3, 4)
"""Multiples of the ranks that split a model are drawn from them."""
_TOLERANCE = 1e-10
"""Largest difference of parameters between exact runs on different numbers of workers, relative to the largest."""
_NOISE = 0.5
"""Least noise of the loss of an asynchronous strategy, relative to its median."""


@dataclass(frozen=True)
class Subject:
    """A strategy whose runs are killed."""

    strategy: str
    transport: str
    epochs: int = 4
    exact: bool = False
    """Whether the result is that of one worker, whatever their number."""
    asynchronous: bool = False
    """Whether the result differs from run to run, and the strategy goes on without a lost rank."""
    tensor: int = 1
    """Number of ranks that split the model, and write its checkpoints together."""

    def __str__(self) -> str:
        return self.strategy if self.tensor == 1 else f"{self.strategy}, tensor={self.tensor}"


SUBJECTS = (
    Subject("native", "shared_memory", exact=True),
    Subject("native", "shared_memory", exact=True, tensor=2),
    Subject("ring", "sockets", exact=True),
    Subject("onebit:exact_below=0", "sockets"),
    Subject("bmuf:every=4", "shared_memory"),
    Subject("ps:bsp", "sockets", exact=True),
    Subject("ps:async", "shared_memory", asynchronous=True),
)

QUICK = tuple(replace(SUBJECTS[number], epochs=2) for number in (2, 3, 4))
"""An exact strategy, and two with state of their own."""


@dataclass
class StormOutcome:
    """What became of the runs of one strategy."""

    strategy: str
    kills: int = 0
    runs: int = 0
    incomplete: int = 0
    """Kills after which a checkpoint that a reader would find was damaged, or an older one had to be used."""
    misused: int = 0
    """Samples that committed steps did not use exactly once."""
    different: int = 0
    """Runs that did not end with the right parameters."""
    judged: str = ""
    """How parameters were compared."""
    largest_difference: float = 0.0
    losses: list[float] = field(default_factory=list)
    """Final losses of the runs."""
    undisturbed_losses: list[float] = field(default_factory=list)
    attempt_s: float = 0.0
    """Mean seconds of an attempt."""
    problems: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether nothing went wrong."""
        return not (self.incomplete or self.misused or self.different or self.problems)


@dataclass
class _Attempt:
    """One launch, and the signal that ends it."""

    run: RunSettings
    number: int
    workers: int
    delay_s: float | None
    """Seconds after the start of the last worker until the kill; None for an attempt that is left alone."""
    victim: int | None
    """The rank that is killed; None for all."""
    pids: dict[int, int] = field(default_factory=dict)
    started_s: float = 0.0
    """When all workers had started."""
    killed: bool = False
    results: list[Any] | None = None
    error: str = ""

    def execute(self, transport: str) -> None:
        """Launch the workers, and wait for their end."""
        timer: list[threading.Timer] = []

        def watch(rank: int, values: dict[str, Any]) -> None:
            self.pids[rank] = values["pid"]
            if len(self.pids) == self.workers:
                self.started_s = time.perf_counter()
                if self.delay_s is not None:
                    timer.append(threading.Timer(self.delay_s, self._kill))
                    timer[0].start()

        said = io.StringIO()
        try:
            with redirect_stderr(said):
                arguments = (self.run, self.number)
                self.results = supervise(train, arguments, self.workers, {"TUTTI_TRANSPORT": transport}, watch).run()
        except WorkerFailed as failed:
            self.error = f"{failed}\n{said.getvalue()[-1000:]}"
        finally:
            for each in timer:
                each.cancel()
                each.join()

    def _kill(self) -> None:
        for rank, pid in self.pids.items():
            if self.victim in (None, rank):
                with suppress(ProcessLookupError):  # It has ended just now.
                    os.kill(pid, signal.SIGKILL)
        self.killed = True


class _Storm:
    """The runs of one strategy."""

    def __init__(self, subject: Subject, num_kills: int, draw: random.Random) -> None:
        self._subject, self._num_kills, self._draw = subject, num_kills, draw
        self.outcome = StormOutcome(str(subject))
        self._undisturbed: list[Result] = []
        self._span_s = 0.0
        """Seconds within which an attempt is killed."""
        self._attempts: list[float] = []

    def undisturbed(self, num_runs: int) -> None:
        """Make the runs with which others are compared."""
        for _ in range(num_runs):
            with tempfile.TemporaryDirectory(prefix="tutti-kills-") as folder:
                attempt = _Attempt(self._run(folder), 0, _WORKERS, None, None)
                attempt.execute(self._subject.transport)
                self._span_s = (time.perf_counter() - attempt.started_s) / 2
                if attempt.results is None:
                    raise RuntimeError(f"an undisturbed run under {self._subject} failed: {attempt.error}")
                self._undisturbed.append(attempt.results[0])
                self.outcome.undisturbed_losses.append(attempt.results[0].loss)
                if wrong := misused(Path(folder), NUM_SAMPLES, attempt.run.epochs):
                    self.outcome.problems.append(f"undisturbed: {wrong} samples were not used exactly once")

    def one_run(self, done: Callable[[StormOutcome], None]) -> None:
        """Kill and continue one run until it ends."""
        outcome = self.outcome
        resized = self._subject.exact and outcome.runs % 2 == 1
        with tempfile.TemporaryDirectory(prefix="tutti-kills-") as folder:
            run, newest, number = self._run(folder), 0, 0
            while True:
                # Steps are formed by the attempt that takes the first checkpoint: on another number of workers they
                # would be others than the reference's.
                attempt = self._attempt(run, number, resized and newest > 0)
                begin_s = time.perf_counter()
                attempt.execute(self._subject.transport)
                self._attempts.append(time.perf_counter() - begin_s)
                number += 1
                if attempt.results is not None and None not in attempt.results:
                    break
                if not attempt.killed:
                    outcome.problems.append(f"attempt {number}: {attempt.error}")
                    break
                outcome.kills += 1
                newest = self._look(run, newest)
                done(outcome)
            outcome.runs += 1
            outcome.attempt_s = sum(self._attempts) / len(self._attempts)
            if attempt.results is not None:
                outcome.misused += misused(Path(folder), NUM_SAMPLES, run.epochs)
                self._compare(attempt.results, resized)

    def _run(self, folder: str) -> RunSettings:
        return RunSettings(self._subject.strategy, folder, self._subject.epochs, tensor=self._subject.tensor)

    def _attempt(self, run: RunSettings, number: int, resized: bool) -> _Attempt:
        others = [number for number in _OTHER_WORKERS if number % self._subject.tensor == 0]
        workers = self._draw.choice(others) if resized else _WORKERS
        delay_s = self._draw.uniform(0, self._span_s) if self.outcome.kills < self._num_kills else None
        # A strategy that goes on without a lost rank cannot know which of its samples were used.
        alone = not self._subject.asynchronous and self._draw.random() < 0.5
        return _Attempt(run, number, workers, delay_s, self._draw.randrange(workers) if alone else None)

    def _look(self, run: RunSettings, before: int) -> int:
        """Look at what a kill has left; return the step of the newest checkpoint."""
        found = candidates(run.checkpoints)
        damaged = [problem for info in found for problem in verify(info.folder)]
        newest = found[0].steps if found else 0
        if damaged or newest < before:
            self.outcome.incomplete += 1
            self.outcome.problems += damaged or [f"the newest checkpoint is of step {newest}, and was of {before}"]
        return newest

    def _compare(self, results: Sequence[Result], resized: bool) -> None:
        outcome, wanted = self.outcome, self._undisturbed[0]
        outcome.losses.append(results[0].loss)
        if self._subject.asynchronous:
            return  # See `judge_losses`.
        outcome.judged = "bits" + ("; 1e-10 if resized" if self._subject.exact else "")
        largest = max(map(abs, wanted.parameters))
        for result in results:
            pairs = zip(result.parameters, wanted.parameters, strict=True)
            difference = max(abs(got - want) for got, want in pairs) / largest
            outcome.largest_difference = max(outcome.largest_difference, difference)
            if result.steps != wanted.steps or not difference <= (_TOLERANCE if resized else 0.0):
                outcome.different += 1
                outcome.problems.append(f"{'resized' if resized else 'same world'}: parameters differ by {difference}")
                break

    def judge_losses(self) -> None:
        """Compare the losses of an asynchronous strategy with the range of undisturbed runs."""
        outcome, losses = self.outcome, self.outcome.undisturbed_losses
        if not (self._subject.asynchronous and outcome.losses):
            return
        # A few runs may by chance be closer together than others are.
        noise = max(max(losses) - min(losses), _NOISE * statistics.median(losses))
        low, high = min(losses) - noise, max(losses) + noise
        outcome.judged = (
            f"losses {min(outcome.losses):.4f} to {max(outcome.losses):.4f}; undisturbed "
            f"{min(losses):.4f} to {max(losses):.4f} ± {noise:.4f}"
        )
        outcome.different = sum(not low <= loss <= high for loss in outcome.losses)


def storm(
    num_kills: int,
    seed: int,
    subjects: Sequence[Subject] = SUBJECTS,
    num_undisturbed: int = 8,
    done: Callable[[StormOutcome], None] = lambda outcome: None,
) -> list[StormOutcome]:
    """Kill runs of each strategy until there were `num_kills` in total; `done` is called after each kill.

    Args:
        num_undisturbed: runs that give the range of results of a strategy whose result differs from run to run.
    """
    outcomes = []
    for number, subject in enumerate(subjects):
        # As many for each, and one more for the first ones if they do not divide evenly.
        share = num_kills // len(subjects) + (number < num_kills % len(subjects))
        one = _Storm(subject, share, random.Random(f"{seed} {subject}"))
        one.undisturbed(num_undisturbed if subject.asynchronous else 1)
        while one.outcome.kills < share and not one.outcome.problems:
            one.one_run(done)
        one.judge_losses()
        outcomes.append(one.outcome)
    return outcomes
