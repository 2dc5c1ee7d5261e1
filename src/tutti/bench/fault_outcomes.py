"""Judgement of injected faults: who was named, why, how soon, and whether the run ended as its strategy promises.

Faults are of four classes, judged by different facts:
- *lost*: the victim's process ends, is stopped or is cut off. All survivors must hear of it, and the launcher must name
  it;
- *slow*: the victim does something long. The diagnosis must name it and its cause, and training then goes on;
- *different*: the victim takes a step, or starts an operation, that no other rank does. Where ranks need each other in
  every step, the error must say who is where. Other strategies go on;
- a stopped coordinator, which must change nothing.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tutti.bench.fault_kinds import FaultCase
from tutti.coordination.diagnosis import HeldUp

TOLERANT = frozenset({"ps:ssp=2", "gossip"})
"""Strategies that go on without a lost rank."""

LOCAL_STEPS = TOLERANT | {"bmuf:every=4"}
"""Strategies whose ranks need not take the same number of steps."""

_LOST = {
    "killed": ("was killed by SIGKILL",),
    # Nobody sees the process of a host's only rank, so it may as well be the network.
    "stopped": ("it is stopped", "its host or the network is down"),
    "exception": ("failed: RuntimeError",),
    "exit": ("exited with status 3",),
    # Where both ends notice at the same time, either may be first to act.
    "link cut": ("its host or the network is down", "it is cut off from the coordinator", "has not connected again"),
}
"""Kinds of faults that end the victim, and what the launcher says of it: one of these."""

_SLOW = {
    "slow loader": "data loading",
    "slow forward": "computing",
    "slow optimizer": "optimizer",
    "evaluation": "evaluation",
    "memory": "memory",
    "interpreter lock": "interpreter lock",
}
"""Kinds that hold the others up for a while, and their cause in the diagnosis."""

_DIFFERENT = ("deadlock", "step alone", "optimizer alone")

KINDS = (*(kind for kind in _LOST if kind != "link cut"), *_SLOW, *_DIFFERENT, "coordinator stopped")
"""Kinds of faults on one machine."""

LAB_KINDS = ("killed", "stopped", "link cut", "slow loader")
"""Kinds of faults on the hosts of a lab."""


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


@dataclass
class FaultRecord:
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
        """Take in what a rank reports."""
        if "pid" in values:
            self.pids.append(values["pid"])
        if "injected" in values:
            self.injected_s = values["injected"]
        if "noticed" in values and rank != self.case.victim:
            self.noticed_s.append(values["noticed"])

    def found(self, held_up: tuple[HeldUp, ...]) -> None:
        """Take in what the diagnosis has found."""
        now = time.monotonic()
        self.findings += [(now, each) for each in held_up]


def judge(record: FaultRecord) -> Outcome:
    """Compare what was seen with what the kind of the fault demands."""
    case = record.case
    outcome = Outcome(case.kind, case.strategy, case.victim)
    if case.kind in _LOST:
        _judge_loss(record, outcome)
    elif case.kind in _SLOW:
        _judge_slow(record, outcome)
    elif case.kind in _DIFFERENT and not (case.kind != "deadlock" and case.strategy in LOCAL_STEPS):
        _judge_difference(record, outcome)
    else:
        outcome.ended_right = record.results == [case.steps] * case.workers
        outcome.rank_right = outcome.cause_right = outcome.ended_right and not record.findings
        outcome.seconds = 0.0 if outcome.ended_right else None
    if not (outcome.rank_right and outcome.cause_right and outcome.ended_right):
        outcome.said = [record.error[:600], str(record.losses), *(str(each) for _, each in record.findings[:4])]
    return outcome


def _judge_loss(record: FaultRecord, outcome: Outcome) -> None:
    case = record.case
    named = dict(record.losses) if case.strategy in TOLERANT else {record.failed_rank: record.error}
    outcome.rank_right = list(named) == [case.victim]
    outcome.cause_right = any(text in named.get(case.victim, "") for text in _LOST[case.kind])
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


def _judge_slow(record: FaultRecord, outcome: Outcome) -> None:
    case = record.case
    outcome.ended_right = record.results == [case.steps] * case.workers
    if not record.findings or record.injected_s is None:
        return
    first_s, first = record.findings[0]
    outcome.rank_right = all(each.rank == case.victim for _, each in record.findings)
    outcome.cause_right = first.cause == _SLOW[case.kind]
    outcome.seconds = first_s - record.injected_s


def _judge_difference(record: FaultRecord, outcome: Outcome) -> None:
    case = record.case
    outcome.seconds = record.ended_s - (record.injected_s or 0.0)
    if case.kind == "deadlock":
        outcome.rank_right = f"rank {case.victim} (step {case.step})" in record.error
        outcome.cause_right = outcome.ended_right = "ranks wait for each other" in record.error
        return
    # It is noticed where the others have no more steps: until then each step of theirs finds one of the victim's.
    ahead = f"rank {case.victim} began the backward pass of step {case.steps + 1}"
    outcome.rank_right = ahead in record.error
    outcome.cause_right = outcome.ended_right = "after the same step" in record.error


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


def worst_s(outcomes: Sequence[Outcome]) -> float | None:
    """The longest time until the right line."""
    return max((each.seconds for each in outcomes if each.seconds is not None), default=None)
