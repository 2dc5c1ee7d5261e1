"""`tutti bench plan`: in a small lab, and mistakes explained."""

import json
from pathlib import Path

import pytest

import tutti.bench.plan
from command import Call, assert_refused
from tutti.launch.lab.lab import missing


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_table_and_a_verdict(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How far predictions are off is the benchmark's business."""
    monkeypatch.setattr(tutti.bench.plan, "HOSTS", 2)
    words = ["--models", "digits", "--rates", "1gbit", "--strategies", "native,onebit", "--rounds", "1"]
    ended = call("bench", "plan", *words, "--json", "plan.json")
    assert ended.status == 0, ended.err
    for said in ("digits, 2 hosts, 1gbit", "predicted", "measured", "error", "~onebit", "over 2 steps", "of 1"):
        assert said in ended.out
    found = json.loads((tmp_path / "plan.json").read_text())
    assert [(row["strategy"], row["exact"]) for row in found["rows"]] == [("native", True), ("onebit", False)]
    for row in found["rows"]:
        assert row["error"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1)
        assert min(row["predicted_s"], row["measured_s"]) > 0
    assert [choice["allowed"] for choice in found["choices"]] == ["exact", "lossy too"]
    assert found["choices"][0] | {"times": 1.0, "right": True} == found["choices"][0], "there is one exact way"
    (measured,) = found["measured"]
    assert 1e6 < measured["link"]["bits_per_s"] < 2e9
    assert len(measured["input_s"]) == 3
    assert 0 < measured["input_s"]["solo"] < min(row["measured_s"] for row in found["rows"])
    assert min(measured["overhead"].values()) >= 0


REFUSED = {
    "a model nobody knows": (["--models", "digits,digit"], r"unknown model 'digit'. Did you mean 'digits'"),
    "no rate": (["--rates", "fast"], r"'fast' is not a rate"),
    "rates of each host": (["--rates", "1gbit/1gbit/1gbit/1mbit"], r"has several rates.*give one rate"),
    "a strategy nobody knows": (["--strategies", "rong"], r"unknown strategy 'rong'"),
    "a strategy nobody can price": (["--strategies", "native,auto"], r"strategy 'auto' has no cost formula"),
    "nothing to time": (["--strategies", ","], r"--strategies needs one or more"),
    "blocks without a length": (["--strategies", "bmuf:every=auto"], r"give 'bmuf:every=auto' a number of steps"),
    "no rounds": (["--rounds", "0"], r"Invalid value for '--rounds'"),
    "a file that cannot be": (["--json", "no/where.json"], r"cannot be written"),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(words: list[str], message: str, call: Call, tmp_path: Path) -> None:
    assert_refused(call("bench", "plan", *words), message, tmp_path)
