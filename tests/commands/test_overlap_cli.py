"""`tutti bench overlap`: a table of what is hidden, of what could be."""

import json
from pathlib import Path

import pytest

from command import Call, assert_refused
from tutti.bench.overlap import OverlapReport
from tutti.launch.lab.lab import missing


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_table(call: Call, tmp_path: Path) -> None:
    """How much is hidden is the benchmark's business."""
    words = ["digits", "--lab", "hosts=2,rate=1gbit", "--rounds", "1", "--json", "overlap.json"]
    ended = call("bench", "overlap", *words)
    assert ended.status == 0, ended.err
    for said in ("hosts=2,rate=1gbit", "no exchange", "possible", "digits"):
        assert said in ended.out
    (row,) = json.loads((tmp_path / "overlap.json").read_text())["rows"]
    assert 0 < row["solo_s"] < row["without_s"]
    assert row["possible_s"] >= 0


def test_the_share() -> None:
    assert OverlapReport("model", 1.0, 2.0, 3.0, possible_s=1.25).share == pytest.approx(0.8)
    assert OverlapReport("model", 1.0, 2.0, 2.0, possible_s=0.0).share == 1.0


REFUSED = {
    "a model nobody knows": (["--models", "digit"], r"unknown model 'digit'. Did you mean 'digits'"),
    "a model twice": (["digits", "--models", "digits"], r"--models changes nothing with the model digits"),
    "no model": (["--models", ","], r"--models needs one or more"),
    "one host": (["--lab", "hosts=1,rate=1gbit"], r"two hosts or more"),
    "ranks that share": (["--lab", "hosts=2,ranks=2,rate=1gbit"], r"of one rank and one rate"),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(words: list[str], message: str, call: Call, tmp_path: Path) -> None:
    assert_refused(call("bench", "overlap", *words), message, tmp_path)
