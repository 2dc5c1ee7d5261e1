"""`tutti simulate scaling`, `tutti simulate --calibrate` and `tutti bench fidelity`."""

import json
from pathlib import Path

import pytest

import tutti.bench.fidelity
from command import Call
from tutti.cluster import Cluster
from tutti.launch.lab.lab import missing

OWN_RECIPE = """
from dataclasses import replace
from pathlib import Path
import torch
from tutti.recipes import digits

MADE = Path(__file__).parent / "made"

def model():
    with MADE.open("a") as file:
        file.write("model ")
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))

def tiny():
    return replace(digits(), model=model)
"""


def test_scaling(call: Call, tmp_path: Path) -> None:
    words = ["--model", "alexnet", "--workers", "2,8", "--batch", "8", "--steps", "2", "--cluster", "infiniband-edr"]
    strategies = ["--strategy", "ring:bucket_bytes=67108864,tree"]
    ended = call("simulate", "scaling", *words, *strategies, "--json", "rows.json", "--plot", "scaling.png")
    assert ended.status == 0, ended.err
    for words in (
        "images/s",
        "efficiency",
        "sent: bytes per",
        "ring:bucket_bytes=67108864",
        "tree",
    ):
        assert words in ended.out
    assert "334.8us a sample" in ended.out  # The P100's 2,987 images a second.
    found = json.loads((tmp_path / "rows.json").read_text())
    assert set(found["strategies"]) == {"ring:bucket_bytes=67108864", "tree"}
    ring = found["strategies"]["ring:bucket_bytes=67108864"]
    assert [row["workers"] for row in ring] == [2, 8]
    assert 0 < ring[1]["efficiency"] < ring[0]["efficiency"] < 1
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


def test_scaling_of_one_number_within_80_columns(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ended = call("simulate", "scaling", "--model", "alexnet", "--workers", "2", "--steps", "1", "--plot", "bars.png")
    assert ended.status == 0, ended.err
    assert max(map(len, ended.out.splitlines())) <= 80
    assert "…" not in ended.out
    assert (tmp_path / "bars.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--model", "resnet5"], "unknown model 'resnet5'. Did you mean 'resnet50'?"),
        (["--workers", "8,none"], "--workers takes numbers of 1 or more"),
        (["--workers", "0"], "--workers takes numbers of 1 or more"),
        (["--accelerator", "v1000"], "unknown accelerator 'v1000'. Did you mean 'v100'?"),
        (["--model", "googlenet", "--accelerator", "k80"], "no published speed of model 'googlenet' on 'k80'"),
        (["--accelerator", "p100", "--sample-time", "1ms"], "give --accelerator or --sample-time, not both"),
        (["--sample-time", "0ms"], "a sample's time must be above 0, got 0.0"),
        (["--sample-time", "soon"], "'soon' is not a time"),
        (["--cluster", "ethernet-1G"], "unknown preset or file 'ethernet-1G'"),
        (["--strategy", "rong"], "unknown strategy 'rong'"),
        (["--plot", "figure.pdf"], "a plot's file ends in"),
    ],
)
def test_scaling_refuses(call: Call, words: list[str], says: str) -> None:
    ended = call("simulate", "scaling", *words)
    assert ended.status == 2
    assert says in ended.err.replace("\n", " ")


def test_calibrate_and_simulate(call: Call, tmp_path: Path) -> None:
    ended = call("simulate", "digits", "--calibrate", "here.toml", "--workers", "2")
    assert ended.status == 0, ended.err
    assert ended.out.endswith("\ntutti simulate digits --cluster here.toml --workers 2\n"), "a line to paste"
    cluster = Cluster.load(tmp_path / "here.toml")
    assert (cluster.hosts, cluster.ranks_per_host) == (1, None), "more workers would share that host"
    assert cluster.compute.sample_s is not None
    assert cluster.compute.step_s > 0
    ended = call(
        "simulate", "digits", "--cluster", "here.toml", "--workers", "2", "--strategy", "native", "--name", "x"
    )
    assert ended.status == 0, ended.err
    seconds = json.loads((tmp_path / "runs" / "x" / "summary.json").read_text())["seconds"]
    assert 0.02 < seconds < 20


def test_calibrate_with_a_recipe_of_ones_own(call: Call, tmp_path: Path) -> None:
    """Its name is that of a built-in recipe, which must not be measured in its place."""
    (tmp_path / "own_calibration.py").write_text(OWN_RECIPE)
    ended = call("simulate", "own_calibration:tiny", "--calibrate", "here.toml", "--workers", "2")
    assert ended.status == 0, ended.err
    assert ended.out.endswith("\ntutti simulate own_calibration:tiny --cluster here.toml --workers 2\n")
    assert (tmp_path / "made").read_text().count("model") >= 2, "both ranks made the user's model"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nosuch"], "A recipe of your own is MODULE:FACTORY"),
        (["digits", "--calibrate", "here.json"], "a file that ends in .toml"),
        (["digits", "--calibrate", "nowhere/here.toml"], "there is no folder nowhere"),
        (["digits", "--calibrate", "here.toml", "--workers", "0"], "workers must be 1 or more"),
        (["digits", "--calibrate", "here.toml", "--workers", "2", "--lab", "hosts=2"], "not both"),
        (["digits", "--lab", "hosts=2"], "--lab only with --calibrate"),
        (["digit", "--calibrate", "here.toml"], "unknown recipe or command 'digit'"),
    ],
)
def test_calibration_refuses(call: Call, words: list[str], says: str) -> None:
    ended = call("simulate", *words)
    assert ended.status == 2
    assert says in ended.err.replace("\n", " ")


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_fidelity_quickly(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are the benchmark's business; the bits are not."""
    monkeypatch.setattr(tutti.bench.fidelity, "HOSTS", 3)
    words = ["--models", "digits", "--strategies", "ring", "--rates", "1gbit", "--steps", "3"]
    ended = call("bench", "fidelity", *words, "--json", "rows.json")
    assert ended.status == 0, ended.err
    assert "parameters are bit-identical in 1 of 1" in ended.out
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert (row["model"], row["strategy"], row["same_bits"]) == ("digits", "ring", True)
    assert row["simulated_s"] > 0


def test_fidelity_refuses(call: Call) -> None:
    for words, says in (
        (["--models", "digit"], "unknown recipe"),
        (["--strategies", "wheel"], "unknown strategy"),
        (["--rates", "fast"], "is not a rate"),
    ):
        ended = call("bench", "fidelity", *words)
        assert ended.status == 2
        assert says in ended.err
