"""Diagnosis: which rank holds the others up, what it is doing, and whether ranks wait for each other for ever.

From the table of all members (`CoordinatorState.table`), without further state:

- A rank *waits* if its training loop waits for other ranks. Waits lead from rank to rank; where they end, at a rank
  that waits for nobody, is the cause.
- A cause is reported once somebody has waited for it for `_SHORTEST_S`, and for `_FACTOR` times its usual step.
- Ranks of which each waits for another of them are *deadlocked*: nothing that any of them does can end it. They are
  reported as stuck when each has waited for longer than the patience of the run, without data that moves. Ranks that
  wait for each other inside MPI or Gloo, which do not show whether data moves, are not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tutti.coordination.activity import MEMBERSHIP_ACTION, MOST_RANKS

_SHORTEST_S = 1.0
"""No wait below this is worth a word."""
_START_S = 5.0
"""The same before the first steps: processes do not start all at once, and first steps are slow."""
_CYCLE_S = 2.0
"""Ranks that have waited for each other for as long are reported. After the patience of the run their waits end."""
_FACTOR = 2.0
"""How many times its usual step a wait has to last."""
_SILENT_S = 0.8
"""A rank that was not heard for this long does not report."""

Row = dict[str, Any]


@dataclass(frozen=True)
class HeldUp:
    """A rank that others wait for, and why."""

    rank: int
    cause: str
    """One of `CAUSES`."""
    detail: str
    """What it does, as the predicate of a sentence about it."""
    waiting: tuple[int, ...]
    """Ranks that wait for it, directly or through others."""
    seconds: float
    """How long the first of them has waited."""

    def __str__(self) -> str:
        if self.cause == "deadlock":
            return f"{ranks_text(self.waiting)} wait for each other for {self.seconds:.1f} s: {self.detail}"
        who = ranks_text(self.waiting)
        return f"rank {self.rank} {self.detail}; {who} {_verb(self.waiting)} for it for {self.seconds:.1f} s"


CAUSES = {
    "gone": "its process has ended",
    "stopped": "its process is stopped",
    "cut off": "its connection to the coordinator is broken, or its host does not answer",
    "interpreter lock": "its process runs and does not report: some code holds the interpreter's lock",
    "memory": "its process waits for memory",
    "data loading": "it loads data",
    "computing": "it computes",
    "evaluation": "it evaluates, or does other work outside of a step",
    "checkpoint": "it saves a checkpoint",
    "optimizer": "its optimiser steps",
    "starting": "it has not begun to train",
    "membership": "it changes to another generation of an elastic run",
    "deadlock": "ranks wait for each other",
}
"""Causes, each with its meaning."""

_PHASES = {
    "loading data": "data loading",
    "forward": "computing",
    "backward": "computing",
    "optimizer": "optimizer",
    "checkpoint": "checkpoint",
    "evaluation": "evaluation",
    "starting": "starting",
    "membership": "membership",
}
"""The cause that a phase stands for; any other is "evaluation"."""


def diagnose(rows: Sequence[Row], lost: dict[int, str] | None = None) -> list[HeldUp]:
    """Find the ranks that others wait for, the one with the most and longest waits first.

    Args:
        rows: what is known of every member.
        lost: ranks that are gone, and why.
    """
    by_rank = {row["rank"]: row for row in rows if row["rank"] >= 0}
    held_up: dict[int, list[tuple[int, float]]] = {}
    for rank, row in by_rank.items():
        wait = _foreground_wait(row)
        if wait is None or wait["s"] < _limit_s(row):
            continue
        for root in _roots(rank, by_rank, lost or {}):
            held_up.setdefault(root, []).append((rank, wait["s"]))
    findings = []
    for root, waiters in held_up.items():
        ranks, seconds = tuple(sorted(rank for rank, _ in waiters)), max(s for _, s in waiters)
        cause, detail = _judge(by_rank.get(root), (lost or {}).get(root))
        findings.append(HeldUp(root, cause, detail, ranks, seconds))
    if not findings and (cycle := deadlocked(rows, _CYCLE_S)):
        waits = [wait["s"] for row in cycle if (wait := _foreground_wait(row)) is not None]
        ranks = tuple(row["rank"] for row in cycle)
        findings.append(HeldUp(ranks[0], "deadlock", deadlock_text(cycle), ranks, min(waits)))
    return sorted(findings, key=lambda finding: (-len(finding.waiting), -finding.seconds))


def deadlocked(rows: Sequence[Row], patience_s: float) -> list[Row]:
    """The ranks of which each waits, for longer than `patience_s`, for another of them, and those that wait for these.

    None of them can go on.
    """
    waits = {
        row["rank"]: wait
        for row in rows
        # Between two generations it waits for the coordinator, which ends that when all living ranks have come.
        if _reports(row) and (wait := _foreground_wait(row)) is not None and wait["action"] != MEMBERSHIP_ACTION
    }

    def waits_for(rank: int, others: set[int]) -> bool:
        ranks = waits[rank]["ranks"]
        # A list that is full may have lost some, one of which may be enough. An empty one says nothing.
        if waits[rank]["any_of"] and not 0 < len(ranks) < MOST_RANKS:
            return False
        # Ranks that are all inside MPI or Gloo may move data between them. One that waits elsewhere does not.
        seen = others if waits[rank]["observed"] else {other for other in others if waits[other]["observed"]}
        return (all if waits[rank]["any_of"] else any)(other in seen for other in ranks)

    stuck = {rank for rank, wait in waits.items() if wait["s"] > patience_s}
    # A rank that waits for some that are not stuck may still go on.
    while free := {rank for rank in stuck if not waits_for(rank, stuck)}:
        stuck -= free
    # Whoever waits for them is stuck too, however short its wait is yet.
    while more := {rank for rank in waits if rank not in stuck and waits_for(rank, stuck)}:
        stuck |= more
    return [row for row in rows if row["rank"] in stuck]


def deadlock_text(rows: Sequence[Row]) -> str:
    """Who of some deadlocked ranks waits for whom, and where."""
    parts = []
    for row in rows:
        wait = _foreground_wait(row)
        assert wait is not None
        whom = ranks_text(wait["ranks"])
        parts.append(f"rank {row['rank']} (step {row['status']['step']}) waits for {whom} to {wait['action']}")
    return "; ".join(parts)


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks for people: "rank 3", "ranks 0, 1 and 2", "ranks 0, 1, 2 and 61 more"."""
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    last = names[-1] if len(names) <= 8 else f"{len(names) - 7} more"
    return f"ranks {', '.join(names[:-1] if len(names) <= 8 else names[:7])} and {last}"


def _verb(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def _foreground_wait(row: Row) -> dict[str, Any] | None:
    """The wait that stops a rank's training loop: the longest, if there are several."""
    waits = [wait for wait in row["status"].get("waits", []) if not wait["background"]]
    return max(waits, key=lambda wait: wait["s"], default=None)


def _limit_s(row: Row) -> float:
    """How long a rank has to wait before that is worth a word."""
    usual_s = float(row["status"].get("step_s", 0.0))
    return max(_SHORTEST_S, _FACTOR * usual_s) if usual_s else _START_S


def _roots(rank: int, by_rank: dict[int, Row], lost: dict[int, str]) -> set[int]:
    """The ranks at which the waits that start at `rank` end: those that wait for nobody."""
    seen, roots, todo = {rank}, set(), [rank]
    while todo:
        row = by_rank.get(todo.pop())
        wait = None if row is None else _foreground_wait(row)
        for other in wait["ranks"] if wait is not None else ():
            there = by_rank.get(other)
            waits_on = there is not None and _reports(there) and _foreground_wait(there) is not None
            if waits_on and other not in seen:
                todo.append(other)
            elif not waits_on and (there is not None or other in lost):
                roots.add(other)
            seen.add(other)
    return roots - {rank}


def _reports(row: Row) -> bool:
    return bool(row["connected"]) and row["silent_s"] < _SILENT_S


def _judge(row: Row | None, lost: str | None) -> tuple[str, str]:
    """The cause, and what the rank does."""
    if row is None:
        return "gone", f"is gone: {lost}"
    where, status = f"on {row['host']}", row["status"]
    if not _reports(row):
        return _judge_silence(row, where)
    if status.get("memory"):
        return "memory", f"{where} waits for memory: {status['memory']}"
    phase, usual_s = status.get("phase", "starting"), status.get("usual_s", 0.0)
    doing = f"{where} is in phase '{phase}' of step {status.get('step', 0)} for {status.get('phase_s', 0.0):.1f} s"
    usual = f", usually {usual_s:.3g} s" if usual_s else ""
    return _PHASES.get(phase, "evaluation"), doing + usual


def _judge_silence(row: Row, where: str) -> tuple[str, str]:
    """The cause for a rank that does not report."""
    if row["process"] == "stopped":
        return "stopped", f"{where} is stopped (process {row['pid']})"
    if not row["connected"]:
        return "cut off", f"{where} has lost its connection to the coordinator"
    silent = f"{where} has not reported for {row['silent_s']:.1f} s"
    if row["process"] == "running":
        return "interpreter lock", f"{silent}: its process runs, and some code holds the interpreter's lock"
    return "cut off", f"{silent}: its host or the network is down"
