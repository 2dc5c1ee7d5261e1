"""`tutti bench backend`: torch.distributed on Tutti and on Gloo, and in virtual time."""

import json
from pathlib import Path

import pytest

from command import Call, assert_refused
from tutti.bench.backend import OPERATIONS, WRAPPERS
from tutti.bench.backend_fidelity import FSDPFidelity
from tutti.launch.lab.lab import missing


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_table(call: Call, tmp_path: Path) -> None:
    """How much faster is the benchmark's business."""
    words = ["--models", "digits", "--lab", "hosts=2,rate=1gbit", "--rounds", "1", "--json", "backend.json"]
    ended = call("bench", "backend", *words)
    assert ended.status == 0, ended.err
    for said in ("DDP", "FSDP2", "digits", "ping-pong", "256 KiB", "×"):
        assert said in ended.out
    rows = json.loads((tmp_path / "backend.json").read_text())["rows"]
    assert len(rows) == len(WRAPPERS) + 3 * len(OPERATIONS)
    assert all(set(row["seconds"]) == {"gloo", "tutti"} for row in rows)


def test_how_far_off() -> None:
    found = FSDPFidelity("char-gpt", 8, {"gloo": 2.0, "tutti": 1.0}, 0.9, {"gloo": True, "tutti": True})
    assert found.error == pytest.approx(-0.1)
    assert found.as_dict()["error"] == found.error


REFUSED = {
    "a model nobody knows": (["--models", "digit"], r"unknown model 'digit'. Did you mean 'digits'"),
    "one worker": (["--workers", "1"], r"--workers takes numbers of 2 or more"),
    "two places": (["--workers", "2", "--lab", "hosts=2"], r"--workers or --lab, not both"),
    "no lab": (["--simulate", "char-gpt"], r"--simulate needs a lab to compare with"),
    "a recipe nobody knows": (["--simulate", "char-gp", "--lab", "hosts=2"], r"Did you mean 'char-gpt'"),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(words: list[str], message: str, call: Call, tmp_path: Path) -> None:
    assert_refused(call("bench", "backend", *words), message, tmp_path)
