"""`tutti bench hostile` and `tutti bench control`, briefly: they run, and hostile connections leave nothing behind."""

import json
from pathlib import Path

from command import Call
from tutti.bench.hostile_connections import COORDINATOR_KINDS, MESSAGE_KINDS


def test_hostile_connections(call: Call, tmp_path: Path) -> None:
    ended = call("bench", "hostile", "--connections", "24", "--rate", "2000", "--json", "rows.json")
    assert ended.status == 0, ended.err
    assert "Traceback" not in ended.err
    [row] = json.loads((tmp_path / "rows.json").read_text())
    assert row["ports"] >= 3, "the coordinator, and a port of each rank"
    assert row["connections"] >= 24 * row["ports"]
    assert COORDINATOR_KINDS.keys() == MESSAGE_KINDS.keys()
    assert row["growth"].keys() == {"rank 0", "rank 1", "launcher"}
    for files, kib in row["growth"].values():
        assert files < 400, "strangers are bounded"
        assert kib < 50_000


def test_cost_of_heartbeats_and_phases(call: Call, tmp_path: Path) -> None:
    ended = call("bench", "control", "--rounds", "2", "--json", "rows.json")
    assert ended.status == 0, ended.err
    [row] = json.loads((tmp_path / "rows.json").read_text())
    assert row["seconds"].keys() == {"with", "without"}
    assert 0 < row["phase_s"] < 1e-4
    assert 0 < row["beat_s"] < 1e-2
    assert 0 < row["share"] < 1
