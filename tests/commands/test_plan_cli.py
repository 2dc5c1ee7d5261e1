"""`tutti plan`: a table, a reason, and mistakes explained."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import tutti.cli.plan.planning
from command import Call, assert_refused
from profiles import lab_perceptron
from tutti.plan import Profile


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """A profile that takes no time to measure, and the batch sizes that were asked for."""
    asked: list[int | None] = []

    def profile_step(model: str, options: dict[str, Any], batch: int | None, input_shape: str | None) -> Profile:
        asked.append(batch)
        return lab_perceptron(0.02)

    monkeypatch.setattr(tutti.cli.plan.planning, "profile_step", profile_step)
    return asked


def test_a_plan(call: Call, tmp_path: Path, profiled: list[int | None]) -> None:
    ended = call("plan", "digits", "--workers", "4", "--cluster", "ethernet-10g", "--json", "plan.json")
    assert ended.status == 0, ended.err
    for words in ("one worker", "exposed", "busy", "samples/s", "Use ", "speed-up", "efficiency", "doubling"):
        assert words in ended.out
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["distribute"] is True
    assert all(each["exact"] for each in found["predictions"])
    assert f"Use {found['predictions'][0]['strategy']}: 4 workers" in ended.out
    assert profiled == [None]


def test_lossy_ones_are_allowed(call: Call, tmp_path: Path, profiled: list[int | None]) -> None:
    (tmp_path / "slow.toml").write_text('name = "slow"\nlink = { rate = "100mbit", latency = "100us" }\n')
    words = ["--cluster", "slow.toml", "--allow", "lossy", "--json", "plan.json"]
    ended = call("plan", "digits", "--workers", "4", *words)
    assert ended.status == 0, ended.err
    assert "accuracy is not predicted" in ended.out
    assert "slower ones" in ended.out
    # 10 epochs of 1,437 samples, in steps of 4 batches.
    num_steps = 14_370 // (4 * lab_perceptron(0.02).num_samples)
    assert f"The run has {num_steps} steps: blocks of more than {num_steps // 4}" in " ".join(ended.out.split())
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["num_steps"] == num_steps
    assert found["compress"] is True
    assert not found["predictions"][0]["exact"]


def test_until_it_is_as_accurate_as_asked(call: Call, tmp_path: Path, profiled: list[int | None]) -> None:
    words = ["--allow", "lossy", "--target-accuracy", "0.5", "--epochs", "1", "--json", "plan.json"]
    ended = call("plan", "digits", "--workers", "2", *words)
    assert ended.status == 0, ended.err
    assert "Time to a test accuracy of 50.00%" in ended.out
    reaches = json.loads((tmp_path / "plan.json").read_text())["reaches"]
    assert f"Use {reaches[0]['strategy']}: 50.00% in " in ended.out
    assert len(reaches) >= 5, "the exact one, and one of every kind"
    times = [each["seconds"] for each in reaches]
    there = [seconds for seconds in times if seconds is not None]
    assert there == sorted(there)
    assert times == there + [None] * (len(times) - len(there)), "who does not get there comes last"
    for each in reaches:
        assert (each["accuracy"] >= 0.5) == (each["epochs"] == 1)
    assert profiled == [32], "the recipe's batch, divided"


def test_never_as_accurate_as_asked(call: Call, profiled: list[int | None]) -> None:
    ended = call("plan", "digits", "--workers", "2", "--target-accuracy", "1", "--epochs", "1", "--batch", "64")
    assert ended.status == 0, ended.err
    assert "None reaches 100.00% within 1 epochs" in ended.out


def test_what_is_uneven_is_simulated(call: Call, tmp_path: Path, profiled: list[int | None]) -> None:
    ended = call("plan", "digits", "--workers", "4", "--cluster", "africa-wan", "--json", "plan.json")
    assert ended.status == 0, ended.err
    assert re.search(r"\d(ms|s)\*", ended.out), "marked as simulated"
    assert json.loads((tmp_path / "plan.json").read_text())["predictions"][0]["simulated"]


def test_within_80_columns(call: Call, monkeypatch: pytest.MonkeyPatch, profiled: list[int | None]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ended = call("plan", "mnist-mlp", "--workers", "16", "--allow", "lossy")
    assert ended.status == 0, ended.err
    assert max(map(len, ended.out.splitlines())) <= 80
    assert "…" not in ended.out
    assert "~onebit" in ended.out
    first_words = [line.split()[0] for line in ended.out.splitlines() if line.strip()]
    assert "~averaging:every=16," in first_words, "names break between options, not within a word"
    assert "nearest to exact" in ended.out


def test_a_batch_of_each_worker_or_of_all(call: Call, profiled: list[int | None]) -> None:
    assert call("plan", "digits", "--workers", "4", "--batch", "8").status == 0
    assert call("plan", "digits", "--workers", "4", "--global-batch", "64").status == 0
    assert profiled == [8, 16]


def test_links_of_this_machine(call: Call, tmp_path: Path, profiled: list[int | None]) -> None:
    ended = call("plan", "digits", "--workers", "2", "--cluster", "measured", "--json", "plan.json")
    assert ended.status == 0, ended.err
    assert "measured: 1 host" in ended.out
    assert len(profiled) == 2, "with all threads, and with one"
    assert "hosts = 1" in json.loads((tmp_path / "plan.json").read_text())["cluster"]


REFUSED = {
    "a cluster nobody knows": (["digits", "--cluster", "ethernet-1G"], r"unknown preset or file 'ethernet-1G'"),
    "no workers": (["digits", "--workers", "0"], r"workers must be 1 or more, got 0"),
    "something else to allow": (["digits", "--allow", "losy"], r"--allow takes 'lossy', got 'losy'\."),
    "a batch below 1": (["digits", "--batch", "-2"], r"--batch must be 1 or more, got -2\."),
    "a batch of all below 1": (["digits", "--global-batch", "0"], r"--global-batch must be 1 or more, got 0\."),
    "too few places": (["digits", "--cluster", "four.toml", "--workers", "5"], r"5 ranks are more than the hosts .*4"),
    "two batches": (["digits", "--batch", "8", "--global-batch", "8"], r"give --batch or --global-batch, not both"),
    "too small a batch": (["digits", "-n", "4", "--global-batch", "3"], r"leaves some of 4 workers without any"),
    "a file that cannot be": (["digits", "--json", "no/where.json"], r"cannot be written"),
    "a target in per cent": (["digits", "--target-accuracy", "97"], r"a fraction such as 0.97, got 97"),
    "a target without data": (["nets:make", "--target-accuracy", "0.9"], r"which a recipe has and a factory has not"),
    "a target and no folder": (["mnist-mlp", "--target-accuracy", "0.9"], r"no data folder given"),
    "epochs of nothing": (["digits", "--epochs", "3"], r"--target-accuracy, which was not given"),
    "a batch too small to cut": (
        ["digits", "-n", "4", "--target-accuracy", "0.9", "--global-batch", "2"],
        r"2 samples cannot be cut for 4 workers",
    ),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(words: list[str], message: str, call: Call, tmp_path: Path, profiled: list[int | None]) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    (tmp_path / "four.toml").write_text('name = "four"\nhosts = 4\nranks_per_host = 1\n')
    assert_refused(call("plan", *words), message, folder)
    assert profiled == [], "refused before anything is measured"


def test_a_recipe_is_measured(call: Call, tmp_path: Path) -> None:
    ended = call("plan", "digits", "--workers", "2", "--batch", "16", "--json", "plan.json")
    assert ended.status == 0, ended.err
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["alone"]["num_samples"] == 16
    assert 0 < found["alone"]["step_s"] < 1


def test_a_recipe_nobody_knows(call: Call, tmp_path: Path) -> None:
    assert_refused(call("plan", "digit"), r"unknown recipe 'digit'. Did you mean 'digits'", tmp_path)


def test_per_layer(call: Call, tmp_path: Path, profiled: list[int | None]) -> None:
    ended = call("plan", "digits", "--workers", "4", "--cluster", "ethernet-1g", "--per-layer", "--json", "plan.json")
    assert ended.status == 0, ended.err
    assert re.search(r"\n *0 +1024 × +64 .* broadcast +broadcast", ended.out), ended.out
    assert re.search(r"\n *2 +10 × +64 .* full +owners", ended.out), ended.out
    found = json.loads((tmp_path / "plan.json").read_text())
    assert [layer["method"] for layer in found["layers"]] == ["broadcast", "broadcast", "full"]
    assert found["predictions"][0]["strategy"] == "poseidon"


def test_meshes(call: Call, tmp_path: Path, profiled: list[int | None]) -> None:
    words = ["--workers", "4", "--cluster", "ethernet-1g", "--memory", "20MiB", "--json", "plan.json"]
    ended = call("plan", "mnist-mlp", *words)
    assert ended.status == 0, ended.err
    for said in ("Meshes, 256 samples per step", "data", "tensor", "pipe", "waiting", "too large", "Use "):
        assert said in ended.out
    found = json.loads((tmp_path / "plan.json").read_text())["meshes"]
    assert len(found["meshes"]) + len(found["refused"]) == 6
    assert found["meshes"][0]["fits"]


def test_no_mesh_fits(call: Call, profiled: list[int | None]) -> None:
    ended = call("plan", "digits", "--workers", "2", "--memory", "1KiB")
    assert ended.status == 0, ended.err
    assert "Do not train this on 2 workers of 1 KiB" in ended.out.replace("\n", " ")


@pytest.mark.parametrize(
    ("memory", "said"), [("much", "'much'"), ("0", "--memory is what a worker has"), ("-1GiB", "")]
)
def test_no_memory(memory: str, said: str, call: Call, tmp_path: Path) -> None:
    assert_refused(call("plan", "digits", "--memory", memory), said, tmp_path)


REFUSED = {"models": ("nobody", "nobody"), "rates": ("fast", "fast"), "workers": ("16", "--workers goes up to 8")}


@pytest.mark.parametrize("option", REFUSED)
def test_meshes_that_are_not_compared(option: str, call: Call, tmp_path: Path) -> None:
    value, said = REFUSED[option]
    assert_refused(call("bench", "meshes", f"--{option}", value), said, tmp_path)
