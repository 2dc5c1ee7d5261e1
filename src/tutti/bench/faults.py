"""`tutti bench faults`: inject faults into one rank of a training job; look whether the right rank and cause are named.

How it works. Each case is a launch of its own, on this machine, in real processes. All launches are made by one child
process (`main`), because one kind of fault stops the launcher. The child writes one line of JSON per case.

Faults are of three classes, judged by different facts:
- *lost*: the victim's process ends or is stopped. All survivors must hear of it, and the launcher must name it;
- *slow*: the victim does something long. The diagnosis must name it and its cause, and training then goes on;
- *deadlock*: the error must say who waits for whom.
A stopped coordinator must change nothing.
"""

import io
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tutti.bench.fault_kinds import FaultCase, train
from tutti.coordination.description import start_time
from tutti.coordination.diagnosis import HeldUp
from tutti.errors import WorkerFailed
from tutti.launch.diagnosis_line import DiagnosisLine
from tutti.launch.interpreter import main_of
from tutti.launch.local import supervise

STRATEGIES = {
    "native": "shared_memory",
    "ring": "sockets",
    "bmuf:every=4": "shared_memory",
    "ps:ssp=2": "shared_memory",
    "gossip": "sockets",
}
"""Strategies and the transport that each runs over."""

TOLERANT = frozenset({"ps:ssp=2", "gossip"})
"""Strategies that go on without a lost rank."""

PATIENCE_S = 3.0

_LOST = {
    "killed": "was killed by SIGKILL",
    "stopped": "it is stopped",
    "exception": "failed: RuntimeError",
    "exit": "exited with status 3",
}
"""Kinds of faults that end the victim, and what the launcher says of it."""

_SLOW = {
    "slow loader": "data loading",
    "slow forward": "computing",
    "evaluation": "evaluation",
    "interpreter lock": "interpreter lock",
}
"""Kinds that hold the others up for a while, and their cause in the diagnosis."""

KINDS = (*_LOST, *_SLOW, "deadlock", "coordinator stopped")


@dataclass
class Outcome:
    """What became of one case."""

    kind: str
    strategy: str
    victim: int
    rank_right: bool = False
    cause_right: bool = False
    seconds: float | None = None
    """From the injection to the first right line or error; for lost ranks, until the last survivor knew."""
    ended_right: bool = False
    """Whether the run ended, or went on, as its strategy promises."""
    left: int = 0
    """Processes that were left behind."""
    said: list[str] = field(default_factory=list)
    """What the launcher said, for those that are wrong."""


def cases(kinds: Sequence[str], strategies: Sequence[str], repeats: int, seed: int = 0) -> list[FaultCase]:
    """The faults to inject, in random order; victims and steps are drawn from `seed`."""
    draw = random.Random(seed)
    found = [
        FaultCase(kind, strategy, STRATEGIES[strategy], draw.randrange(3), draw.randrange(15, 30))
        for kind in kinds
        for strategy in strategies
        for _ in range(repeats)
    ]
    draw.shuffle(found)
    return found


def measure(chosen: Sequence[FaultCase], done: Callable[[Outcome], None] = lambda outcome: None) -> list[Outcome]:
    """Run all cases; `done` is called with each outcome."""
    outcomes = []
    with subprocess.Popen(
        [*main_of("tutti.bench.faults"), json.dumps([asdict(case) for case in chosen])],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        # So that a shell does not take the child that stops itself for a job that was stopped.
        start_new_session=True,
        env={**os.environ, "TUTTI_PATIENCE": f"{PATIENCE_S:g}s"},
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:  # Ended by the child, all of whose waits end.
                outcome = Outcome(**json.loads(line))
                outcomes.append(outcome)
                done(outcome)
        except BaseException:
            process.kill()
            raise
    return outcomes


def main() -> None:
    """Run the cases in the argument, and write an outcome per line."""
    os.environ["TUTTI_BENCH_LAUNCHER"] = str(os.getpid())
    for fields in json.loads(sys.argv[1]):
        print(json.dumps(asdict(_run(FaultCase(**fields)))), flush=True)


@dataclass
class _Record:
    """What was seen of one run."""

    case: FaultCase
    pids: list[int] = field(default_factory=list)
    injected_s: float | None = None
    noticed_s: list[float] = field(default_factory=list)
    findings: list[tuple[float, HeldUp]] = field(default_factory=list)
    results: list[Any] | None = None
    error: str = ""
    failed_rank: int | None = None
    ended_s: float = 0.0
    losses: list[tuple[int, str]] = field(default_factory=list)

    def watch(self, rank: int, values: dict[str, Any]) -> None:
        if "pid" in values:
            self.pids.append(values["pid"])
        if "injected" in values:
            self.injected_s = values["injected"]
        if "noticed" in values and rank != self.case.victim:
            self.noticed_s.append(values["noticed"])

    def found(self, held_up: tuple[HeldUp, ...]) -> None:
        now = time.monotonic()
        self.findings += [(now, each) for each in held_up]


def _run(case: FaultCase) -> Outcome:
    record = _Record(case)
    supervisor = supervise(train, (case,), case.workers, {"TUTTI_TRANSPORT": case.transport}, record.watch)
    supervisor.diagnosis = DiagnosisLine(io.StringIO(), record.found)
    try:
        record.results = supervisor.run()
    except WorkerFailed as failed:
        record.error, record.failed_rank = str(failed), failed.rank
    record.ended_s, record.losses = time.monotonic(), supervisor.losses
    outcome = _judge(record)
    outcome.left = sum(start_time(pid) != -1 for pid in record.pids)
    return outcome


def _judge(record: _Record) -> Outcome:
    case = record.case
    outcome = Outcome(case.kind, case.strategy, case.victim)
    if case.kind in _LOST:
        _judge_loss(record, outcome)
    elif case.kind in _SLOW:
        _judge_slow(record, outcome)
    elif case.kind == "deadlock":
        outcome.rank_right = f"rank {case.victim} (step {case.step})" in record.error
        outcome.cause_right = outcome.ended_right = "ranks wait for each other" in record.error
        outcome.seconds = record.ended_s - (record.injected_s or 0.0)
    else:
        outcome.ended_right = record.results == [case.steps] * case.workers
        outcome.rank_right = outcome.cause_right = outcome.ended_right and not record.findings
        outcome.seconds = 0.0 if outcome.ended_right else None
    if not (outcome.rank_right and outcome.cause_right and outcome.ended_right):
        outcome.said = [record.error[:600], str(record.losses), *(str(each) for _, each in record.findings[:4])]
    return outcome


def _judge_loss(record: _Record, outcome: Outcome) -> None:
    case = record.case
    named = dict(record.losses) if case.strategy in TOLERANT else {record.failed_rank: record.error}
    outcome.rank_right = list(named) == [case.victim]
    outcome.cause_right = _LOST[case.kind] in named.get(case.victim, "")
    survivors = case.workers - 1
    if len(record.noticed_s) == survivors and record.injected_s is not None:
        outcome.seconds = max(record.noticed_s) - record.injected_s
    if case.strategy in TOLERANT:
        results = record.results or []
        outcome.ended_right = [each for each in results if each is not None] == [case.steps] * survivors
    else:
        outcome.ended_right = record.results is None
    # The diagnosis may come first, and must not be wrong then either.
    outcome.rank_right &= all(each.rank == case.victim for _, each in record.findings)


def _judge_slow(record: _Record, outcome: Outcome) -> None:
    case = record.case
    outcome.ended_right = record.results == [case.steps] * case.workers
    if not record.findings or record.injected_s is None:
        return
    first_s, first = record.findings[0]
    outcome.rank_right = all(each.rank == case.victim for _, each in record.findings)
    outcome.cause_right = first.cause == _SLOW[case.kind]
    outcome.seconds = first_s - record.injected_s


@dataclass(frozen=True)
class Control:
    """A run in which nothing goes wrong."""

    strategy: str
    steps: int
    false_alarms: int


def undisturbed(strategy: str, steps: int) -> Control:
    """Train without a fault, and count what is reported all the same."""
    case = FaultCase("none", strategy, STRATEGIES[strategy], 0, 0, steps)
    record = _Record(case)
    supervisor = supervise(train, (case,), case.workers, {"TUTTI_TRANSPORT": case.transport}, record.watch)
    supervisor.diagnosis = DiagnosisLine(io.StringIO(), record.found)
    supervisor.run()
    return Control(strategy, steps, len(record.findings))


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Shares of right ranks, causes and ends over all outcomes."""
    number = max(1, len(outcomes))
    kills = [each.seconds for each in outcomes if each.kind == "killed" and each.seconds is not None]
    return {
        "faults": len(outcomes),
        "rank_right": sum(each.rank_right for each in outcomes) / number,
        "cause_right": sum(each.cause_right for each in outcomes) / number,
        "ended_right": sum(each.ended_right for each in outcomes) / number,
        "left_behind": sum(each.left for each in outcomes),
        "slowest_kill_s": max(kills, default=None),
    }


def median_s(outcomes: Sequence[Outcome]) -> float | None:
    """The median time until the right line, over the outcomes that have one."""
    times = [each.seconds for each in outcomes if each.seconds is not None]
    return statistics.median(times) if times else None


if __name__ == "__main__":
    main()
