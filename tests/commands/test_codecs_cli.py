"""Codecs at the command line: train, simulate, bench and reproduce."""

import json
import re
from pathlib import Path

import pytest

from command import Call, assert_refused
from tutti.bench.compression import GAIN, CompressionReport
from tutti.codecs import CODECS
from tutti.launch.lab.lab import missing

REFUSED = {
    "a codec nobody knows": (["train", "digits", "--strategy", "onbit"], r"unknown strategy 'onbit'.*'onebit'"),
    "too dense": (["train", "digits", "--strategy", "topk:2"], r"density must be above 0 and at most 1, got 2"),
    "no bits": (["train", "digits", "--strategy", "quantize:3"], r"bits must be one of 8, 4, 2, got 3"),
    "a negative threshold": (["train", "digits", "--strategy", "threshold:-1"], r"tau must be above 0 .*got -1"),
    "no rank": (
        ["train", "digits", "--strategy", "lowrank:0"],
        r"rank must be a whole number of 1 or more, got 0",
    ),
    "an algorithm that a codec does not use": (
        ["train", "digits", "--strategy", "ring:exact_below=100+onebit"],
        r"'ring' and a codec do not go together.*Write 'onebit:exact_below=100'",
    ),
    "half a chain": (["train", "digits", "--strategy", "onebit+topk"], r"Chain joins one that selects"),
    "what cannot match": (["train", "digits", "--strategy", "fp16", "--check"], r"'fp16' is lossy"),
    "what needs feedback": (
        ["train", "digits", "--strategy", "topk:0.01,momentum=0.9,feedback=0"],
        r"wrap it in ErrorFeedback",
    ),
    "an option nobody has": (["train", "digits", "--strategy", "topk:k=3"], r"it has density, warmup_steps"),
    "a model nobody knows": (["bench", "compression", "digit"], r"unknown model 'digit'\. Did you mean 'digits'"),
    "two places": (["bench", "compression", "--lab", "hosts=2", "-n", "2"], r"give --workers or --lab, not both"),
    "a codec where it does not go": (["bench", "compression", "--strategy", "onebit"], r"codecs go into --codecs"),
    "a codec that cannot be timed": (["bench", "compression", "--codecs", "onebit,x"], r"unknown codec 'x'"),
    "a device nobody knows": (["bench", "codecs", "--device", "tpu"], r"--device takes cpu or cuda, got 'tpu'"),
    "too small": (["bench", "codecs", "--size", "1KiB"], r"--size takes a row of 4096 bytes or more"),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(words: list[str], message: str, call: Call, tmp_path: Path) -> None:
    assert_refused(call(*words), message, tmp_path)


def test_train_and_simulate(call: Call, tmp_path: Path) -> None:
    """Both learn, and send as much; the same bits are the business of other tests."""
    sent = {}
    for name, words in {
        "real": ["train", "digits", "-n", "2", "--strategy", "onebit:exact_below=100"],
        "virtual": ["simulate", "digits", "-n", "2", "--strategy", "onebit:exact_below=100"],
    }.items():
        ended = call(*words, "--epochs", "3", "--name", name)
        assert ended.status == 0, ended.err
        lines = [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        last = [line for line in lines if line.get("kind") == "epoch"][-1]
        assert last["accuracy"] > 0.7
        sent[name] = last["bytes_sent"]
    assert sent["real"] == sent["virtual"]


def test_bench_codecs(call: Call, tmp_path: Path) -> None:
    ended = call("bench", "codecs", "--size", "256KiB", "--rounds", "1", "--json", "codecs.json")
    assert ended.status == 0, ended.err
    result = json.loads((tmp_path / "codecs.json").read_text())
    names = {row["codec"].partition(":")[0] for row in result["rows"]}
    assert names >= CODECS.keys()
    for row in result["rows"]:
        assert all(speed > 0 for speed in row["gb_per_s"].values())
        assert 0 <= row["error"] < 2
        assert row["packet_bytes"] < row["num_bytes"]
    assert "copying it" in ended.out


def test_bench_compression(call: Call, tmp_path: Path) -> None:
    place = ["--lab", "hosts=2,rate=100mbit"] if missing() is None else ["--workers", "2"]
    ended = call(
        "bench", "compression", "mlp-0.1M", *place, "--codecs", "onebit,lowrank", "--rounds", "1", "--json", "it.json"
    )
    assert ended.status == 0, ended.err
    found = json.loads((tmp_path / "it.json").read_text())
    assert found["seconds"].keys() == {"solo", "ddp", "native", "ring", "onebit", "lowrank"}
    assert found["bytes_sent"]["ring"] > 10 * found["bytes_sent"]["onebit"]
    verdict = ended.out.strip().splitlines()[-1]
    assert verdict == found["recommendation"]


@pytest.mark.parametrize(
    ("onebit_s", "fp16_s", "says"),
    [
        (0.5, 1.3, "use onebit: 1.8 times as fast as native. Accuracy was not measured."),
        (0.5, 0.52, "use fp16: 1.7 times as fast as native; onebit is 1.8 times as fast, and sends less. "),
        (1.2, 1.3, "none: the fastest codec, onebit, takes 133% of the time of native. Do not compress here."),
        (0.9 / GAIN + 0.01, 1.3, "none: "),
    ],
)
def test_the_verdict_may_be_none(onebit_s: float, fp16_s: float, says: str) -> None:
    seconds = {"solo": 0.1, "ddp": 1.1, "native": 0.9, "ring": 1.0, "fp16": fp16_s, "onebit": onebit_s}
    sent = {"native": 4000.0, "ring": 4000.0, "fp16": 2000.0, "onebit": 130.0}
    assert says in CompressionReport("digits", 1000, 2, seconds, sent, "ring").recommendation()


def test_reproduce_error_feedback_quickly(call: Call, tmp_path: Path) -> None:
    ended = call("reproduce", "error-feedback", "--quick", "--name", "again")
    assert ended.status == 0, ended.err
    folder = tmp_path / "runs" / "again"
    report = (folder / "report.md").read_text()
    assert re.search(r"\| onebit \| \d+ \| \d\d\.\d\d % \([+-]", report)
    for figure in re.findall(r"\]\((\S+\.png)\)", report):
        assert (folder / figure).stat().st_size > 10_000
    result = json.loads((folder / "results.json").read_text())
    assert len(result["accuracy"]) == 5
    assert all(row["points"] for row in result["curves"])
