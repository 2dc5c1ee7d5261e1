"""The `tutti` command: what it prints, what it writes, how it exits."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import tutti
from command import Call, assert_refused, stop_in_the_middle
from tutti.bench import under_mpi
from tutti.cli import app
from tutti.collectives import ALGORITHMS
from tutti.launch.lab.lab import Lab, missing
from tutti.recipes import RECIPES
from tutti.strategies import AllReduce
from tutti.versions import TORCH

SCRIPTS = Path(__file__).parents[1] / "scripts"

TELL = str(SCRIPTS / "tell.py")


def commands() -> dict[str, list[str]]:
    """Every command with its subcommands, as the words one types; hidden ones need no word."""
    found: dict[str, list[str]] = {"tutti": []}

    def walk(command: object, words: list[str]) -> None:
        for name, inner in getattr(command, "commands", {}).items():
            if inner.hidden:
                continue
            found[" ".join([*words, name])] = [*words, name]
            walk(inner, [*words, name])

    walk(typer.main.get_command(app), [])
    return found


# --- help ---


@pytest.mark.parametrize("words", commands().values(), ids=commands())
def test_help(words: list[str], call: Call) -> None:
    ended = call(*words, "--help")
    assert ended.status == 0
    assert f"Usage: tutti {' '.join(words)}".strip() in ended.out
    assert ended.err == ""


def test_help_lists_every_command(call: Call) -> None:
    out = call("--help").out
    for name in ("run", "train", "profile", "plan", "simulate", "doctor", "bench", "lab", "reproduce"):
        assert re.search(rf"^│ {name} +\S", out, re.MULTILINE), out


def test_help_names_every_recipe(call: Call) -> None:
    out = call("train", "--help").out
    for name in RECIPES:
        assert name in out


def test_version(call: Call) -> None:
    ended = call("--version")
    assert (ended.status, ended.out) == (0, f"tutti {tutti.__version__}\n")


def test_known_strategies_are_listed_once(call: Call, tmp_path: Path) -> None:
    ended = call("train", "digits", "--strategy", "zzz")
    names = ended.err.partition("Known: ")[2].strip().rstrip(".").split(", ")
    assert "butterfly" in names
    assert len(names) == len(set(names))


def test_unknown_command(call: Call) -> None:
    ended = call("dance")
    assert ended.status == 2
    assert "No such command 'dance'" in ended.err


# --- what is refused before anything starts: one message, status 2, nothing written ---


REFUSED = {
    "no script": (["run", "absent.py"], r"there is no script 'absent.py' in /"),
    "a folder as script": (["run", "."], r"there is no script '\.' in /"),
    "unknown strategy": (["run", "--strategy", "nativ", TELL], r"unknown strategy 'nativ'\. Did you mean 'native'\?"),
    "known strategies": (["run", "--strategy", "zzz", TELL], r"unknown strategy 'zzz'\. Known: .*native"),
    "no workers": (["run", "--workers", "0", TELL], r"workers must be 1 or more, got 0|'--workers'"),
    "fewer than no workers": (["run", "--workers", "-1", TELL], r"workers must be 1 or more, got -1|'--workers'"),
    "workers not a number": (["run", "--workers", "two", TELL], r"--workers must be a number of workers, or MIN:MAX"),
    "unknown recipe": (["train", "digit"], r"unknown recipe 'digit'\. Did you mean 'digits'\? Known: .*mnist-mlp"),
    "unknown strategy to train with": (["train", "digits", "--strategy", "zzz"], r"unknown strategy 'zzz'\. Known: "),
    "no workers to train with": (["train", "digits", "--workers", "0"], r"workers must be 1 or more|'--workers'"),
    "no epochs": (["train", "digits", "--epochs", "0"], r"Invalid value for '--epochs'"),
    "no data": (["train", "mnist-mlp"], r"no data folder given, and 'mnist/.*' is needed\. Give one with --data"),
    "a name that leads elsewhere": (["train", "digits", "--epochs", "1", "--name", "../x"], r"--name|'\.\./x'"),
    "unknown case": (["bench", "step", "--models", "nope"], r"unknown model 'nope'\. .*Known: .*mlp-1\.9M"),
    "one case of two": (["bench", "step", "--models", "digits,nope"], r"unknown model 'nope'"),
    "one worker to compare": (["bench", "allreduce", "--workers", "1"], r"--workers takes numbers of 2 or more.*'1'"),
    "no number": (["bench", "step", "--workers", "2,x"], r"--workers takes numbers of 2 or more.*got '2,x'"),
    "no size": (["bench", "collectives", "--sizes", "1KiB,big"], r"'big' is not a size: .*64KiB"),
    "no rate": (["bench", "collectives", "--lab", "hosts=2,rate=fast"], r"'fast' is not a rate.*100mbit"),
    "no hosts": (["doctor", "--network", "--lab", "hosts=0"], r"hosts must be from 1 to 250, got '0'"),
    "one host": (["doctor", "--network", "--lab", "hosts=1"], r"has one rank, and links are between two"),
    "two places": (["bench", "collectives", "--lab", "hosts=2", "-n", "4"], r"give --workers or --lab, not both"),
    "where to measure nothing": (["doctor", "--lab", "hosts=2"], r"give --network too"),
    "a rate nobody can shape": (["doctor", "--network", "--lab", "hosts=2,rate=1bit"], r"from 100kbit to 100gbit, got"),
    "no lab": (["doctor", "--network", "--lab", " "], r"a lab needs a description, such as hosts=4"),
    "no picture": (["bench", "collectives", "--plot", "times.jpeg"], r"ends in \.png or \.svg, got 'times\.jpeg'"),
    "no experiment": (["reproduce", "allreduce-mnits"], r"unknown reproduction.*Did you mean 'allreduce-mnist'"),
    "a rate nobody uses": (["reproduce", "strads", "--rate", "1gbit"], r"'strads' does not use --rate"),
    "data nobody uses": (["reproduce", "poseidon", "--data", "."], r"'poseidon' does not use --data"),
    "options of nothing": (["reproduce", "--quick"], r"--quick needs the NAME of a reproduction: allreduce-mnist, "),
    "nothing is measured": (["reproduce", "strads", "--quick", "--report-only"], r"--quick has no effect with"),
    "nothing is stored": (["reproduce", "strads", "--report-only", "--name", "x"], r"no stored results in runs/x"),
    "no such lab rate": (["reproduce", "allreduce-mnist", "--rate", "x"], r"'x' is not a rate"),
    "rounds of nothing": (["bench", "meshes", "--rounds", "3"], r"--rounds changes nothing without --lab"),
    "rates of a lab": (
        ["bench", "meshes", "--lab", "hosts=2", "--rates", "1gbit"],
        r"--rates changes nothing",
    ),
    "models not simulated": (
        ["bench", "backend", "--simulate", "digits", "--lab", "hosts=2", "--models", "digits"],
        r"--models changes nothing with --simulate",
    ),
    "a strategy to calibrate": (
        ["simulate", "--calibrate", "x.toml", "--strategy", "ring"],
        r"--strategy changes nothing with --calibrate",
    ),
    "data to plan": (["plan", "digits", "--data", "."], r"--data changes nothing without --target-accuracy"),
    "no rounds": (["bench", "allreduce", "--rounds", "0"], r"Invalid value for '--rounds'"),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(words: list[str], message: str, call: Call, tmp_path: Path) -> None:
    assert_refused(call(*words), message, tmp_path)


def test_missing_data_file(call: Call, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    ended = call("train", "mnist-mlp", "--data", str(data))
    assert ended.status == 2
    wanted = rf"missing data file {data}/mnist/train-images-idx3-ubyte.gz\. Get it from .*, and put it at that path"
    assert re.search(wanted, ended.err), ended.err
    assert list(tmp_path.iterdir()) == [data]


def test_data_folder_from_the_environment(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUTTI_DATA", str(tmp_path))
    assert f"missing data file {tmp_path}/mnist/" in call("train", "mnist-mlp").err


def test_existing_run_is_not_overwritten(call: Call, tmp_path: Path) -> None:
    record = tmp_path / "runs" / "mine" / "metrics.jsonl"
    record.parent.mkdir(parents=True)
    record.write_text("precious\n")
    ended = call("train", "digits", "--name", "mine")
    assert ended.status == 2
    assert "runs/mine exists already; give another --name" in ended.err
    assert record.read_text() == "precious\n"


# --- run ---


def told(output: str) -> list[dict[str, object]]:
    """What every rank said of itself, by rank."""
    lines = [re.fullmatch(r"\[rank (\d+)\] (\{.*\})", line) for line in output.splitlines()]
    facts = sorted((int(line[1]), json.loads(line[2])) for line in lines if line)
    assert all(rank == fact["rank"] for rank, fact in facts)
    return [fact for _, fact in facts]


def test_run_gives_the_script_its_arguments_and_keeps_its_strategy(call: Call) -> None:
    args = ["--train", "--lr", "0.1", "-n", "7", "--workers=9", "--", "a b", "--help"]
    ended = call("run", "-n", "2", TELL, *args)
    assert ended.status == 0, ended.err
    facts = told(ended.out)
    assert [fact["rank"] for fact in facts] == [0, 1]
    for fact in facts:
        assert fact["size"] == 2
        assert fact["args"] == args
        assert fact["name"] == "__main__"
        assert fact["folder"] == str(SCRIPTS), "so that the script finds its neighbours"
        assert fact["bucket_bytes"] == 1234


def test_run_overrules_the_scripts_strategy(call: Call) -> None:
    ended = call("run", "--workers", "1", "--strategy", "native", TELL, "--train")
    assert ended.status == 0, ended.err
    assert told(ended.out)[0]["bucket_bytes"] == AllReduce().bucket_bytes != 1234


def test_run_starts_a_worker_per_core_by_default(call: Call) -> None:
    if (cores := len(os.sched_getaffinity(0))) > 8:
        pytest.skip(f"{cores} workers are too many for a test")
    ended = call("run", TELL)
    assert [fact["size"] for fact in told(ended.out)] == [cores] * cores


def test_run_exits_as_the_script_does(call: Call) -> None:
    ended = call("run", "-n", "2", TELL, "--exit", "5")
    assert ended.status == 5
    assert "error: rank 1 exited with status 5" in ended.err
    assert len(told(ended.out)) == 2


def test_run_shows_the_traceback_of_the_script(call: Call) -> None:
    ended = call("run", "-n", "2", TELL, "--raise")
    assert ended.status == 1
    assert "error: rank 1 failed: LookupError: nothing to be found" in ended.err
    assert f'File "{TELL}", line ' in ended.err
    assert 'raise LookupError("nothing to be found")' in ended.err
    assert "runpy" not in ended.err


def test_run_passes_the_timeout_on(call: Call) -> None:
    ended = call("run", "-n", "1", "--timeout", "-1", TELL)
    assert ended.status != 0
    assert "number of seconds above 0, got" in ended.err or "--timeout" in ended.err


# --- train ---


def test_train_records_the_run(call: Call, tmp_path: Path) -> None:
    words = ["train", "digits", "--workers", "2", "--epochs", "1", "--name", "x", "--json", "copy.json"]
    ended = call(*words)
    assert ended.status == 0, ended.err
    assert "recorded in runs/x" in ended.out
    files = {file.name for file in (tmp_path / "runs" / "x").iterdir() if not file.name.startswith(".")}
    assert files == {"metrics.jsonl", "summary.json", "latest.json", "step-00000022"}

    records = [json.loads(line) for line in (tmp_path / "runs" / "x" / "metrics.jsonl").read_text().splitlines()]
    assert records
    for record in records:
        assert {"samples_per_s", "bytes_sent", "waiting_share", "step", "total_steps", "epoch"} <= record.keys()
        assert record["samples_per_s"] > 0
        assert 0 <= record["waiting_share"] <= 1
        assert 0 < record["step"] <= record["total_steps"]
    assert any("loss" in record for record in records)
    accuracies = [record["accuracy"] for record in records if "accuracy" in record]
    assert len(accuracies) == 1, "one per epoch"

    summary = json.loads((tmp_path / "runs" / "x" / "summary.json").read_text())
    assert summary == json.loads((tmp_path / "copy.json").read_text())
    assert (summary["recipe"], summary["strategy"], summary["workers"]) == ("digits", "native", 2)
    assert summary["steps"] == records[-1]["step"] == records[-1]["total_steps"]
    assert summary["samples"] == 1437
    assert summary["accuracy"] == pytest.approx(accuracies[0])
    assert 0.5 < summary["accuracy"] < 1
    assert summary["bytes_sent"] > 0
    assert "accuracy" in ended.out


def test_train_check(call: Call, tmp_path: Path) -> None:
    ended = call("train", "digits", "--check", "--epochs", "1", "--name", "checked")
    assert ended.status == 0, ended.err
    assert "2 workers matched one" in ended.out
    summary = json.loads((tmp_path / "runs" / "checked" / "summary.json").read_text())
    assert 0 <= summary["check"]["difference"] <= 1e-10
    assert summary["check"]["alone_accuracy"] == pytest.approx(summary["accuracy"])


def test_train_is_stopped(tmp_path: Path) -> None:
    """In the middle of training; the fixture looks for what is left."""
    stop_in_the_middle(["train", "digits"], signal.SIGINT, tmp_path)
    record = tmp_path / "runs" / "long" / "metrics.jsonl"
    assert all(json.loads(line) for line in record.read_text().splitlines()), "whole lines"


# --- doctor and bench ---


def test_doctor(call: Call, tmp_path: Path) -> None:
    ended = call("doctor", "--json", "found.json")
    assert ended.status == 0, ended.err
    findings = {finding["what"]: finding for finding in json.loads((tmp_path / "found.json").read_text())}
    assert {"tutti", "libraries", "Gloo", "cores", "shared memory", "network interfaces", "lab"} <= findings.keys()
    assert f"torch {torch.__version__}" in findings["libraries"]["detail"]
    assert findings["torch"]["detail"] == f"supported: {' to '.join(TORCH)}"
    assert findings["tutti"]["detail"].startswith(f"{tutti.__version__} on Python 3.")
    assert findings["libraries"]["ok"] is True
    assert str(len(os.sched_getaffinity(0))) in findings["cores"]["detail"]
    for what in findings:
        assert what in ended.out


def test_doctor_says_what_is_missing(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert (
        "the lab needs root (run it with sudo), and ip and tc in PATH (install the package iproute2)"
        in call("doctor").out
    )


def test_doctor_finds_a_stranger_of_the_same_name(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = tmp_path / "site" / "tutti-1.0.0.dist-info"
    stranger.mkdir(parents=True)
    (stranger / "METADATA").write_text("Metadata-Version: 2.1\nName: tutti\nVersion: 1.0.0\n")
    monkeypatch.syspath_prepend(stranger.parent)
    call("doctor", "--json", "found.json")
    findings = {finding["what"]: finding for finding in json.loads((tmp_path / "found.json").read_text())}
    assert findings["distribution 'tutti'"]["ok"] is False
    assert "1.0.0 is installed, which is not this library ('tutti-train')" in findings["distribution 'tutti'"]["detail"]
    assert "pip uninstall tutti" in findings["distribution 'tutti'"]["detail"]


def test_bench_step(call: Call, tmp_path: Path) -> None:
    ended = call("bench", "step", "--models", "digits", "--workers", "2", "--rounds", "1", "--json", "times.json")
    assert ended.status == 0, ended.err
    (row,) = json.loads((tmp_path / "times.json").read_text())
    assert (row["model"], row["workers"], row["num_parameters"]) == ("digits", 2, 4810)
    ways = {"solo", "ddp", "tutti"} | ({"mpi"} if under_mpi.available() else set())
    assert row["seconds"].keys() == ways
    assert all(seconds > 0 for seconds in row["seconds"].values())
    assert row["times_ddp"] == pytest.approx(row["seconds"]["ddp"] / row["seconds"]["tutti"])
    assert row["efficiency"] == pytest.approx(row["seconds"]["solo"] / row["seconds"]["tutti"])
    if under_mpi.available():
        assert row["times_mpi"] == pytest.approx(row["seconds"]["mpi"] / row["seconds"]["tutti"])
    else:
        assert row["times_mpi"] is None
        assert "Open MPI was not timed" in ended.out


def test_an_option_after_the_script_is_explained(call: Call, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import argparse; argparse.ArgumentParser().parse_args()")
    ended = call("run", "script.py", "--workers", "1")
    assert ended.status == 2
    assert "--workers was passed to the script: give it before script.py." in ended.err


def test_doctor_measures_links(call: Call, tmp_path: Path) -> None:
    ended = call("doctor", "--network", "--workers", "3", "--json", "links.json")
    assert ended.status == 0, ended.err
    assert "Links between ranks, 3 workers on loopback" in ended.out
    assert "deviation: how far single messages are" in ended.out
    links = json.loads((tmp_path / "links.json").read_text())
    assert [link["ranks"] for link in links] == [[0, 1], [0, 2], [1, 2]]
    assert all(link["bits_per_s"] > 1e6 and 0 <= link["latency_s"] < 1 for link in links)


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_doctor_measures_a_lab(call: Call, tmp_path: Path) -> None:
    ended = call("doctor", "--network", "--lab", "hosts=3,rate=16mbit/16mbit/4mbit", "--json", "links.json")
    assert ended.status == 0, ended.err
    rates = {tuple(link["ranks"]): link["bits_per_s"] for link in json.loads((tmp_path / "links.json").read_text())}
    # Slow links: their bucket is several milliseconds of the rate, so they keep it up on a busy machine. The bucket is
    # at most 9 % of the largest message, 64 KiB, and costs no time.
    assert 12e6 < rates[0, 1] < 17.6e6
    assert 3e6 < rates[0, 2] < 4.4e6
    assert 3e6 < rates[1, 2] < 4.4e6
    assert re.search(r"cost formulas use the link that is slowest for 1 MiB: [34]\.\d+mbit", ended.out)


def test_bench_collectives(call: Call, tmp_path: Path) -> None:
    places = ["--lab", "hosts=2,rate=1gbit,ranks=2"] if missing() is None else ["--workers", "4"]
    options = ["--sizes", "1KiB,64KiB", "--rounds", "1", "--plot", "times.png", "--json", "times.json"]
    ended = call("bench", "collectives", *places, *options)
    assert ended.status == 0, ended.err
    result = json.loads((tmp_path / "times.json").read_text())
    assert [row["num_bytes"] for row in result["rows"]] == [1024, 65536]
    for row in result["rows"]:
        assert row["seconds"].keys() >= {*ALGORITHMS, "cheapest", "gloo"}
        assert row["predicted"].keys() == ALGORITHMS.keys()
        assert ("mpi" in row["seconds"]) == under_mpi.available()
    assert (tmp_path / "times.png").stat().st_size > 10_000
    assert "64 KiB" in ended.out


def test_reproduce_quickly(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under mpirun on this host; in the lab, where `test_bench_collectives` is under it too, by Tutti's launcher."""
    under_mpirun = under_mpi.run

    def run(function: Any, *args: Any, on: Lab | None = None, **options: Any) -> Any:
        if on is not None:
            return tutti.launch(function, *args, on=on)[0]
        return under_mpirun(function, *args, **options)

    monkeypatch.setattr(under_mpi, "run", run)
    ended = call("reproduce", "allreduce-mnist", "--quick", "--rate", "1gbit", "--name", "again")
    assert ended.status == 0, ended.err
    folder = tmp_path / "runs" / "again"
    report = (folder / "report.md").read_text()
    assert "Accuracy is measured with the recipe digits" in report
    for figure in re.findall(r"\]\((\S+\.png)\)", report):
        assert (folder / figure).stat().st_size > 10_000
    rows = json.loads((folder / "results.json").read_text())["accuracy"]
    accuracies = {row["algorithm"]: row["accuracy"] for row in rows}
    assert len(set(accuracies.values())) == 1, f"two workers can add in one order only: {accuracies}"
    assert accuracies["ring"] > 0.9
