"""`tutti bench elastic`: one run of the matrix, and mistakes."""

import json
from pathlib import Path

import pytest

from command import Call, assert_refused
from tutti.bench.elastic.goodput import goodput


def test_some_of_the_matrix(call: Call, tmp_path: Path) -> None:
    only = "ring,sockets,kill rank 1"
    ended = call("bench", "elastic", "--parts", "matrix", "--only", only, "--json", "rows.json")
    assert ended.status == 0, ended.err
    assert "1 runs, of which 0 did not keep their promise" in ended.out
    [row] = json.loads((tmp_path / "rows.json").read_text())
    assert (row["promise"], row["problems"]) == ("exact", [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--parts", "floods"],
            "no part of this benchmark is called 'floods'. Known: kills, joins, cost, goodput",
        ),
        (["--parts", "matrix", "--only", "ring,floods"], "no strategy, transport or fault has the words ring, floods"),
        (["--kills", "0"], "Invalid value for '--kills'"),
    ],
)
def test_refused(words: list[str], message: str, call: Call, tmp_path: Path) -> None:
    assert_refused(call("bench", "elastic", *words), message, tmp_path)


def test_goodput_is_the_share_of_a_minute_that_was_not_lost() -> None:
    ends = [0.1 * step for step in range(1, 1201) if not 60.0 < 0.1 * step <= 66.0]
    assert goodput(ends, 0.0, 60.0) == pytest.approx(1, abs=0.01)
    assert goodput(ends, 60.0, 60.0) == pytest.approx(0.9, abs=0.01)
