"""`tutti simulate`: what it prints, what it writes, how it exits."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from command import Call, stop_in_the_middle
from tutti.cluster import PRESETS, Cluster
from tutti.recipes.training import TrainingConfig, TrainingResult, train
from tutti.simulation.runs.simulate import simulate

RunCli = Callable[..., "subprocess.CompletedProcess[str]"]

FILES = {"metrics.jsonl", "summary.json", "cluster.toml", "progress.png", "utilisation.png"}
"""What a whole run leaves."""


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


# --- a run ---


def test_a_run_and_the_same_again(run_cli: RunCli, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in this process and once in another."""
    words = ["simulate", "digits", "-n", "4", "--epochs", "2", "--slow", "3=2.0", "--jitter", "0.1"]
    monkeypatch.setenv("COLUMNS", "80")
    first = call(*words, "--name", "one", "--json", "copy.json")
    again = run_cli(*words, "--name", "two")
    assert (first.status, again.returncode) == (0, 0), first.err + again.stderr
    assert first.err == again.stderr == ""
    assert "recorded in runs/one" in first.out
    assert max(map(len, first.out.splitlines())) <= 80
    for label in (
        "on average",
        "virtual time",
        "start, evaluation",
        "messages",
        "computing",
        "waiting for others",
        "busiest links",
    ):
        assert label in first.out
    one, two = tmp_path / "runs" / "one", tmp_path / "runs" / "two"
    assert {file.name for file in one.iterdir()} == FILES
    assert all((one / name).stat().st_size > 10_000 for name in ("progress.png", "utilisation.png"))

    cluster = Cluster.load(one / "cluster.toml")
    assert (cluster.name, cluster.slow, cluster.jitter.spread) == ("ethernet-1g", {3: 2.0}, 0.1)  # type: ignore[union-attr]
    summary, same = (json.loads((folder / "summary.json").read_text()) for folder in (one, two))
    assert summary == json.loads((tmp_path / "copy.json").read_text())
    check_summary(summary)
    check_reports(records(one / "metrics.jsonl"), summary)
    assert summary.pop("wall_s") > 0
    assert same.pop("wall_s") > 0
    assert summary == same, "the same but for the time it took"
    assert (one / "metrics.jsonl").read_text() == (two / "metrics.jsonl").read_text()


def check_summary(summary: dict[str, Any]) -> None:
    assert (summary["recipe"], summary["strategy"], summary["cluster"]) == ("digits", "native", "ethernet-1g")
    assert "waiting_share" not in summary, "ranks has it, apart from communicating"
    assert (summary["workers"], summary["epochs"], summary["samples"]) == (4, 2, 2 * 1437)
    assert 0.85 < summary["accuracy"] < 1
    assert 0 < summary["seconds"] < 1, "of virtual time"
    # 46 steps of a quarter of 64 samples; the slow rank takes twice its computing time.
    assert 0.5 < summary["steps"] * summary["step_s"] / summary["seconds"] < 0.999, "the rest is said to be no step"
    assert summary["num_messages"] > 500
    assert len(summary["ranks"]) == 4
    for rank in summary["ranks"]:
        assert sum(rank.values()) <= summary["seconds"] * (1 + 1e-9)
    assert summary["ranks"][3]["busy_s"] > 1.5 * summary["ranks"][2]["busy_s"], "rank 3 is slow"
    assert {"host0 out", "host3 in"} <= summary["links"].keys()
    assert all(0 < link["busy_s"] < summary["seconds"] for link in summary["links"].values())
    assert summary["lost"] == {}


def check_reports(reports: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    steps = [report for report in reports if report["kind"] == "step"]
    assert [report["step"] for report in steps] == list(range(1, summary["steps"] + 1)), "few steps: each is told"
    for before, after in pairwise(steps):
        assert before["seconds"] < after["seconds"] <= summary["seconds"]
        assert before["epoch"] < after["epoch"] <= 2
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]
    assert steps[-1]["loss"] == pytest.approx(summary["loss"]), "the mean over ranks"
    tests = [report for report in reports if report["kind"] == "epoch"]
    assert [report["epoch"] for report in tests] == [1, 2]
    assert tests[-1]["accuracy"] == summary["accuracy"]


def test_a_run_on_what_a_file_says(call: Call, tmp_path: Path) -> None:
    (tmp_path / "four.toml").write_text('name = "four"\nhosts = 2\nranks_per_host = 2\n[compute]\nsample = "1ms"\n')
    ended = call("simulate", "--cluster", "four.toml", "-n", "4", "digits", "--epochs", "1", "--strategy", "tree")
    assert ended.status == 0, ended.err
    assert "digits, 4 workers on four, tree" in ended.out
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("simulated-digits-4x-")
    summary = json.loads((folder / "summary.json").read_text())
    assert 1437 / 4 * 1e-3 < summary["seconds"] < 1437 / 2 * 1e-3, "a millisecond a sample"
    assert {"host0 out", "host0 in", "host1 out", "host1 in"} <= summary["links"].keys()
    assert not any("host2" in name for name in summary["links"])


def test_without_matplotlib(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ended = call("simulate", "digits", "-n", "2", "--epochs", "1", "--name", "plain")
    assert ended.status == 0, ended.err
    assert "no figures: plots need matplotlib: pip install 'tutti-train[report]'." in ended.out
    assert {file.name for file in (tmp_path / "runs" / "plain").iterdir()} == FILES - {
        "progress.png",
        "utilisation.png",
    }


def test_many_workers_match_one() -> None:
    """As many as a batch has samples; the last batch of an epoch is no multiple of them."""
    task = TrainingConfig(recipe="digits", strategy="tree", epochs=1, double=True)
    alone, many = (simulate(train, task, workers=workers).results[0] for workers in (1, 64))
    assert isinstance(many, TrainingResult)
    assert many.steps == alone.steps
    assert (many.parameters - alone.parameters).abs().max() <= 1e-10 * alone.parameters.abs().max()


# --- help ---


def test_help_shows_the_default_and_the_commands(call: Call) -> None:
    out = call("simulate", "--help").out
    assert re.search(r"Usage: tutti simulate \[OPTIONS\] \[?RECIPE\|MODULE:FACTORY\]? \| COMMAND", out), out
    for words in ("--workers", "--cluster", "--slow", "--jitter", "africa-wan", "mnist-mlp"):
        assert words in out
    assert re.search(r"^│ clusters +\S", out, re.MULTILINE), out
    assert call("simulate", "digits", "--help").status == 0


def test_clusters(call: Call, tmp_path: Path) -> None:
    out = call("simulate", "clusters").out
    assert all(str(cluster) in out for cluster in PRESETS.values())
    assert call("simulate", "clusters", "africa-wan").out == f"{PRESETS['africa-wan']}\n"
    (tmp_path / "mine.toml").write_text(call("simulate", "clusters", "ethernet-10g", "--toml").out)
    assert Cluster.load(tmp_path / "mine.toml") == PRESETS["ethernet-10g"]
    assert call("simulate", "clusters", "mine.toml").out == f"{PRESETS['ethernet-10g']}\n"


# --- what is refused before anything starts: one message, status 2, nothing written ---


REFUSED = {
    "unknown recipe": (["digit"], r"unknown recipe or command 'digit'\. Did you mean 'digits'\?"),
    "unknown command": (["scale"], r"unknown recipe or command 'scale'\. Did you mean 'scaling'\? Known: (?!.*run)"),
    "no recipe": (["-n", "4"], r"tutti simulate takes a RECIPE, such as digits"),
    "two recipes": (
        ["digits", "digits"],
        r"(?s)Usage: tutti simulate \[OPTIONS\].*Try 'tutti simulate --help'.*unexpected extra",
    ),
    "unknown cluster": (["digits", "--cluster", "ethernet-1gb"], r"'ethernet-1gb'\. Did you mean 'ethernet-1g'\?"),
    "unknown cluster to show": (["clusters", "nope"], r"unknown preset or file 'nope'\. Known: .*nvlink-island"),
    "unknown strategy": (["digits", "--strategy", "rin"], r"unknown strategy 'rin'\. Did you mean 'ring'\?"),
    "no workers": (["digits", "-n", "0"], r"workers must be 1 or more, got 0"),
    "more than a batch has": (["digits", "-n", "65"], r"64 samples cannot be cut for 65 workers.*Use 64 workers"),
    "more than the cluster holds": (["digits", "-n", "5", "--cluster", "four.toml"], r"5 ranks are more than.*hold, 4"),
    "a file that is not there": (["digits", "--cluster", "absent.toml"], r"there is no file absent\.toml"),
    "a folder": (["digits", "--cluster", "."], r"\. is a folder, not a cluster's TOML file"),
    "bad keys": (
        ["digits", "--cluster", "bad.toml"],
        r"bad\.toml:\n  unknown key 'lnk'\. Did you mean 'link'\?.*\n  seed",
    ),
    "no TOML": (["digits", "--cluster", "worse.toml"], r"worse\.toml is not TOML"),
    "slow that is no rank": (["digits", "-n", "4", "--slow", "4=2"], r"slow names rank 4, but the ranks are 0 to 3"),
    "slow that is no pair": (["digits", "--slow", "three"], r"--slow takes RANK=FACTOR, such as 3=2\.0, got 'three'"),
    "slow without end": (["digits", "--slow", "3=0"], r"rank 3's factor must be above 0"),
    "jitter below none": (["digits", "--jitter", "-1"], r"jitter's spread must be 0 or more"),
    "jitter in per cent": (["digits", "--jitter", "50"], r"spread must be 5 or less, got 50: it is a share"),
    "no epochs": (["digits", "--epochs", "0"], r"Invalid value for '--epochs'"),
    "no data": (["mnist-mlp"], r"no data folder given"),
    "no option": (["digits", "--option", "width=3"], r"recipe 'digits' has no option width"),
    "nowhere to write": (["digits", "--json", "absent/x.json"], r"--json: absent/x\.json cannot be written"),
    "a name that leads elsewhere": (["digits", "--name", "../x"], r"--name is the name of a folder under runs/"),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(words: list[str], message: str, call: Call, tmp_path: Path) -> None:
    texts = {
        "four": 'name = "four"\nhosts = 2\nranks_per_host = 2\n',
        "bad": 'lnk = 1\nseed = "x"\n',
        "worse": "name =",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.toml").write_text(text)
    ended = call("simulate", *words)
    assert ended.status == 2, ended
    assert re.search(message, ended.err), ended.err
    assert "Traceback" not in ended.err
    assert {file.name for file in tmp_path.iterdir()} == {"four.toml", "bad.toml", "worse.toml"}, "nothing was written"


# --- runs that do not come to their end ---


def test_a_rank_dies(call: Call, tmp_path: Path) -> None:
    (tmp_path / "dying.toml").write_text('name = "dying"\n[failures]\n1 = "1ms"\n')
    ended = call("simulate", "digits", "-n", "4", "--cluster", "dying.toml", "--name", "dead")
    assert ended.status == 1
    assert "RankLost" in ended.err
    assert "rank 1 is gone" in ended.err
    assert ended.err.endswith("the partial record of the run is in runs/dead\n")
    assert "summary.json" not in {file.name for file in (tmp_path / "runs" / "dead").iterdir()}


def test_ctrl_c(tmp_path: Path) -> None:
    """In the middle of training: at once, without a traceback, and nothing that looks like a whole run."""
    took_s = stop_in_the_middle(["simulate", "digits", "-n", "64"], signal.SIGINT, tmp_path)
    assert took_s < 8, "not after the grace that threads get"
    record = tmp_path / "runs" / "long" / "metrics.jsonl"
    assert {file.name for file in record.parent.iterdir()} == {"metrics.jsonl", "cluster.toml"}
    assert records(record), "whole lines"
