"""Which ranks are found to wait for each other for ever, by what each of them reports."""

from datetime import timedelta
from typing import Any

import pytest

from tutti.coordination import LocalCoordinator, MemberDescription
from tutti.coordination.activity import MEMBERSHIP_ACTION, MOST_RANKS, Activity
from tutti.coordination.diagnosis import deadlocked, diagnose
from tutti.transports.membership import Membership, Peer, waiting_for

PATIENCE_S = 10.0


def row(rank: int, ranks: list[int] | None, any_of: bool = False, observed: bool = True) -> dict[str, Any]:
    """What the coordinator knows of a rank that waits for others, or computes if they are None."""
    kind = {"any_of": any_of, "observed": observed, "background": False}
    wait = {"ranks": ranks, "action": "reply", "s": 6 * PATIENCE_S, **kind}
    status = {"waits": [] if ranks is None else [wait], "step": 0}
    return {"rank": rank, "id": f"m{rank}", "connected": True, "silent_s": 0.0, "status": status}


def found(*rows: dict[str, Any]) -> list[int]:
    return [each["rank"] for each in deadlocked(rows, PATIENCE_S)]


def test_a_cycle_is_a_deadlock() -> None:
    assert found(row(0, [1]), row(1, [0]), row(2, None)) == [0, 1]


def test_a_receive_from_any_ends_with_one_that_computes() -> None:
    assert found(row(0, [1, 2], any_of=True), row(1, [0]), row(2, None)) == []
    assert found(row(0, [1, 2], any_of=True), row(1, [0]), row(2, [0])) == [0, 1, 2]


def test_a_receive_from_more_ranks_than_are_reported_may_end() -> None:
    size = MOST_RANKS + 10
    activity = Activity()
    with activity.waiting(range(1, size), "reply", any_of=True):
        [wait] = activity.status()["waits"]
    workers = [row(rank, [0]) for rank in range(1, MOST_RANKS + 1)]
    computing = [row(rank, None) for rank in range(MOST_RANKS + 1, size)]
    assert found(row(0, wait["ranks"], any_of=True), *workers, *computing) == []


def test_a_wait_for_nobody_is_none() -> None:
    assert found(row(0, [], any_of=True), row(1, None)) == []


def test_ranks_that_wait_inside_of_a_library_may_move_data() -> None:
    assert found(row(0, [1], observed=False), row(1, [0], observed=False)) == []
    assert found(row(0, [1]), row(1, [0, 2], observed=False), row(2, [0, 1], observed=False)) == [0, 1, 2]


def enters(rank: int, *others: int) -> dict[str, Any]:
    """A rank that waits for the next generation of an elastic run."""
    waits = row(rank, list(others), any_of=True, observed=False)
    waits["status"]["waits"][0]["action"] = MEMBERSHIP_ACTION
    return waits


def test_ranks_that_wait_for_the_next_generation_are_neither_stuck_nor_the_cause() -> None:
    rows = [enters(0, 1, 2), enters(1, 0, 2), row(2, [0])]
    assert found(*rows) == []
    assert found(enters(0, 1), row(1, [0])) == []
    assert diagnose([enters(0, 1), row(1, [0])]) == []
    # A rank that has not come, because it computes, is.
    computes = {**row(2, None), "host": "here"}
    [cause] = diagnose([enters(0, 1, 2), enters(1, 0, 2), computes])
    assert (cause.rank, cause.waiting) == (2, (0, 1))
    # A new worker waits for nobody in particular.
    assert diagnose([enters(3), computes]) == []


def membership(rank: int, numbers: list[int], processes: list[int]) -> Membership:
    """Rank `rank` of a group: its ranks have `numbers` there, and their launcher gave them others."""
    members = [MemberDescription(f"m{each}", each, "here", "here", each, 1) for each in processes]
    peers = [Peer(number, member) for number, member in zip(numbers, members, strict=True)]
    return Membership(rank, peers, LocalCoordinator().member(members[rank]), "world", timedelta(seconds=0.05))


def reported(made: Membership) -> dict[str, Any]:
    [wait] = made.member.activity.status()["waits"]
    return dict(wait)


def test_ranks_that_wait_for_values_of_one_that_is_late() -> None:
    rows = [row(0, None)]
    for rank in (1, 2):
        made, waits = membership(rank, [0, 1, 2], [0, 1, 2]), []
        with pytest.raises(Exception, match="waited"):
            made.await_values(["key"], "all ranks", lambda made=made, waits=waits: waits.append(reported(made)) or {})
        rows.append(row(rank, waits[0]["ranks"], any_of=waits[0]["any_of"]))
    assert found(*rows) == []


def test_the_owner_of_a_value_is_named() -> None:
    made, waits = membership(1, [0, 1, 2], [0, 1, 2]), []
    with pytest.raises(Exception, match="waited"):
        made.await_values(["key"], "rank 2", lambda: waits.append(reported(made)) or {}, owner=2)
    assert waits[0]["ranks"] == [2]


def test_waits_are_reported_by_the_numbers_of_the_launcher() -> None:
    made = membership(0, [0, 1, 2], [2, 0, 1])
    with waiting_for(made, 1, "reply"):
        assert reported(made)["ranks"] == [0]
    with waiting_for(made, -1, "reply"):
        assert reported(made)["ranks"] == [0, 1]
