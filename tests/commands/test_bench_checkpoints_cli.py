"""`tutti bench checkpoints`: a few kills, short timings, and mistakes; and the count of samples behind it."""

import json
from pathlib import Path

from command import Call, assert_refused
from tutti.bench.checkpoints.records import Record, misused


def test_kills_quickly(call: Call, tmp_path: Path) -> None:
    ended = call("bench", "checkpoints", "--quick", "--parts", "kills", "--json", "rows.json")
    assert ended.status == 0, ended.err
    assert "6 kills: 0 left an incomplete checkpoint; all runs right under 3 of 3 strategies" in ended.out
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["part"] for row in rows] == ["kills"] * 3
    for row in rows:
        assert (row["kills"], row["misused"], row["different"], row["problems"]) == (2, 0, 0, [])
        assert row["runs"] >= 1


def test_times_quickly(call: Call, tmp_path: Path) -> None:
    ended = call("bench", "checkpoints", "--quick", "--parts", "cost,resume,writing", "--json", "rows.json")
    assert ended.status == 0, ended.err
    cost, resume, writing = json.loads((tmp_path / "rows.json").read_text())
    assert [row["part"] for row in (cost, resume, writing)] == ["cost", "resume", "writing"]
    assert cost["size_ratio"] < 1.02
    assert cost["copy_s"] > 0
    assert resume["read_s"] > 0
    assert 9e6 < writing["state_bytes"] < 11e6
    assert min(writing["checkpoint"], writing["dd"]) > 0


def test_an_unknown_part_is_refused(call: Call, tmp_path: Path) -> None:
    message = "no part of this benchmark is called 'flood'. Known: kills, cost, resume, writing."
    assert_refused(call("bench", "checkpoints", "--parts", "flood"), message, tmp_path)


def test_steps_after_the_next_start_do_not_count(tmp_path: Path) -> None:
    with Record(tmp_path, 0, 0, 0) as first, Record(tmp_path, 0, 1, 0) as other:
        first.append(1, 0, [0, 1])
        other.append(1, 0, [2])
        first.append(2, 0, [3])  # Lost: the next attempt continues from step 1.
    assert misused(tmp_path, 5, 1) == 1
    with Record(tmp_path, 1, 0, 1) as second:
        second.append(2, 0, [4, 3])
    assert misused(tmp_path, 5, 1) == 0
    with Record(tmp_path, 2, 0, 2) as third:
        third.append(3, 0, [0])  # A second time.
        third.append(4, 1, [0])  # An epoch too many.
    assert misused(tmp_path, 5, 1) == 2


def test_a_record_that_lacks_a_sample_shows(tmp_path: Path) -> None:
    with Record(tmp_path, 0, 0, 0) as record:
        record.append(1, 0, [0, 2])
    assert misused(tmp_path, 3, 1) == 1
