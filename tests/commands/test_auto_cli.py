"""`tutti bench auto`: a table of what Auto settles on, beside DDP."""

import json
from pathlib import Path

import pytest

from command import Call, assert_refused
from tutti.bench.auto import AutoReport


def test_a_table(call: Call, tmp_path: Path) -> None:
    """How fast it is, is the benchmark's business."""
    ended = call("bench", "auto", "--models", "digits", "--workers", "2", "--rounds", "1", "--json", "auto.json")
    assert ended.status == 0, ended.err
    for said in ("2 workers on loopback", "no exchange", "auto chose", "digits"):
        assert said in ended.out
    (row,) = json.loads((tmp_path / "auto.json").read_text())["rows"]
    assert row["workers"] == 2
    assert row["chosen"]
    assert 3 <= row["steps"] < 100, "it has settled"
    assert set(row["seconds"]) == {"solo", "DDP", "native", "auto"}


def test_the_ratio() -> None:
    assert AutoReport("model", 2, {"DDP": 3.0, "auto": 2.0}, "native", 5, 0.1).times_ddp == pytest.approx(1.5)


REFUSED = {
    "a model nobody knows": (["--models", "digit"], r"unknown model 'digit'. Did you mean 'digits'"),
    "no model": (["--models", ","], r"--models needs one or more"),
    "one host": (["--lab", "hosts=1,rate=1gbit"], r"has one rank"),
    "two places": (["--lab", "hosts=2,rate=1gbit", "--workers", "2"], r"not both"),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(words: list[str], message: str, call: Call, tmp_path: Path) -> None:
    assert_refused(call("bench", "auto", *words), message, tmp_path)
