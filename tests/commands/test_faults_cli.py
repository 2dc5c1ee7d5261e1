"""`tutti bench faults`: a few faults, and mistakes."""

import json
from pathlib import Path

from command import Call, assert_refused


def test_quickly(call: Call, tmp_path: Path) -> None:
    ended = call("bench", "faults", "--quick", "--control-steps", "20", "--json", "rows.json")
    assert ended.status == 0, ended.err
    assert "2 faults: right rank in 100 %, right cause in 100 %, ended as promised in 100 %" in ended.out
    assert "0 processes left behind; 0 false alarms in 20 steps" in ended.out
    killed, slow, control = sorted(
        json.loads((tmp_path / "rows.json").read_text()), key=lambda row: row.get("kind", "x")
    )
    assert killed["kind"] == "killed"
    assert killed["seconds"] < 2
    assert slow["kind"] == "slow loader"
    assert slow["seconds"] < 3
    assert control == {"strategy": "native", "steps": 20, "false_alarms": 0, "said": []}


def test_no_faults_beside_a_busy_process(call: Call) -> None:
    ended = call("bench", "faults", "--kinds", "none", "--control-steps", "5", "--load", "1")
    assert ended.status == 0, ended.err
    assert ended.out.strip() == "0 false alarms in 25 steps"


def test_kinds_in_a_lab(call: Call, tmp_path: Path) -> None:
    ended = call("bench", "faults", "--lab", "hosts=2", "--kinds", "exit")
    assert_refused(ended, "no kind of fault in a lab is called 'exit'. Known: killed, stopped, link cut", tmp_path)


def test_refused(call: Call, tmp_path: Path) -> None:
    assert_refused(call("bench", "faults", "--kinds", "flood"), "no kind of fault is called 'flood'", tmp_path)
