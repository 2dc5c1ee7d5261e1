"""Judgement of faults: who must be named, by which strategies, and what counts as the right end."""

from typing import Any

import pytest

from tutti.bench.fault_kinds import FAULTS, FaultCase
from tutti.bench.fault_outcomes import KINDS, LAB_KINDS, FaultRecord, judge
from tutti.coordination.diagnosis import CAUSES, HeldUp

STEPS, WORKERS = 60, 3


def record(kind: str, strategy: str = "native", **seen: Any) -> FaultRecord:
    case = FaultCase(kind, strategy, "sockets", 1, 20, STEPS, WORKERS)
    return FaultRecord(case, injected_s=10.0, ended_s=12.0, **seen)


def right(seen: FaultRecord) -> tuple[bool, bool, bool]:
    outcome = judge(seen)
    return outcome.rank_right, outcome.cause_right, outcome.ended_right


def held_up(cause: str, rank: int = 1) -> list[tuple[float, HeldUp]]:
    return [(11.5, HeldUp(rank, cause, "does something", (0, 2), 1.2))]


def test_each_kind_can_be_injected() -> None:
    assert {*KINDS, *LAB_KINDS} <= FAULTS.keys()


@pytest.mark.parametrize(
    ("kind", "cause"), [("slow optimizer", "optimizer"), ("memory", "memory"), ("evaluation", "evaluation")]
)
def test_slow_ranks(kind: str, cause: str) -> None:
    assert cause in CAUSES
    ended = [STEPS] * WORKERS
    assert right(record(kind, results=ended, findings=held_up(cause))) == (True, True, True)
    assert right(record(kind, results=ended, findings=held_up("computing"))) == (True, False, True)
    assert right(record(kind, results=ended, findings=held_up(cause, rank=0))) == (False, True, True)
    assert right(record(kind, results=ended)) == (False, False, True)
    assert right(record(kind, error="it failed")) == (False, False, False)


@pytest.mark.parametrize("kind", ["step alone", "optimizer alone"])
def test_ranks_at_different_steps(kind: str) -> None:
    said = "rank 0 is in job.finish() after step 60, rank {} began the backward pass of step 61, rank 2 is in "
    said += "job.finish() after step 60. Every rank must enter job.finish() after the same step"
    assert right(record(kind, "ring", error=said.format(1))) == (True, True, True)
    assert right(record(kind, "ring", error=said.format(0))) == (False, True, True)
    assert right(record(kind, "ring", results=[STEPS] * WORKERS)) == (False, False, False)
    # Whoever takes local steps need not take as many as the others.
    assert right(record(kind, "gossip", results=[STEPS] * WORKERS)) == (True, True, True)
    assert right(record(kind, "gossip", results=[STEPS] * WORKERS, findings=held_up("computing"))) == (
        False,
        False,
        True,
    )


def test_a_cut_link() -> None:
    down = "is lost: its process 7 on host1 was silent for 3 s: its host or the network is down"
    seen = record("link cut", "ring", error=f"rank 1 {down}", failed_rank=1, noticed_s=[13.1, 13.2])
    assert right(seen) == (True, True, True)
    assert judge(seen).seconds == pytest.approx(3.2)
    assert right(record("link cut", "ring", error="rank 1 failed: RankLost: rank 0 is gone", failed_rank=1))[1] is False
    survivors = [STEPS, None, STEPS]
    assert right(record("link cut", "gossip", results=survivors, losses=[(1, down)])) == (True, True, True)
    assert right(record("link cut", "gossip", results=survivors, losses=[(2, down)])) == (False, False, True)
