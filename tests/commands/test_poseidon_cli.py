"""`tutti reproduce poseidon`, in its quick form, and what its report is made of."""

import json
import re
from pathlib import Path

import pytest

from command import Call
from reproductions.poseidon.claims import AWARE, PLAIN, PRICED, WAIT_FREE, speed_up, step_seconds
from reproductions.poseidon.run import QUICK, WAYS, compute
from reproductions.poseidon.traffic import RULES, factors, formula_bytes, parameters, shapes, solved, widths
from tutti.launch.lab.lab import missing


def test_reproduce_quickly(call: Call, tmp_path: Path) -> None:
    ended = call("reproduce", "poseidon", "--quick", "--name", "again")
    assert ended.status == 0, ended.err
    folder = tmp_path / "runs" / "again"
    report = (folder / "report.md").read_text()
    figures = re.findall(r"\]\((\S+\.png)\)", report)
    assert figures == ["speed-up-1gbit.png", "staleness.png", "traffic.png"]
    assert all((folder / figure).stat().st_size > 10_000 for figure in figures)
    result = json.loads((folder / "results.json").read_text())
    assert len(result["rows"]) == len(QUICK.models) * len(QUICK.workers) * len(WAYS)
    ups = {way: speed_up(result, "alexnet", "1gbit", way, 4) for way in (PLAIN, WAIT_FREE, AWARE, PRICED)}
    assert ups[PLAIN] < ups[WAIT_FREE] < 0.5 * ups[AWARE], "at 1 Gbit/s AlexNet's matrices are what takes long"
    assert ups[PRICED] >= 0.99 * ups[AWARE]
    assert step_seconds(result, "even")[0] < step_seconds(result, "one slow")[0] < step_seconds(result, "pauses")[0]
    assert step_seconds(result, "pauses")[3] < 0.95 * step_seconds(result, "pauses")[0]
    assert [row["rule"] for row in result["bytes"]] == list(RULES)
    assert all(abs(row["error"]) < 0.02 for row in result["bytes"])
    assert "| AlexNet: fully connected layers hold 96.25% | 95.96% | agrees |" in report
    if missing() is None:
        (lab,) = result["lab"]
        shape = widths(QUICK.lab_narrower)
        for rule in RULES:
            formula = formula_bytes(rule, shape, lab["workers"], lab["batch"])
            assert lab["sent_bytes"][f"poseidon:rule={rule}"] == pytest.approx(formula, rel=0.02)
    else:
        assert "The lab was not used" in report


def test_the_published_factors_are_of_four_workers() -> None:
    workers, ratio = solved()
    assert workers == pytest.approx(4, rel=0.01)
    fc7 = shapes("AlexNet", 256)[1]
    assert fc7.num_out * fc7.num_in / (fc7.num_out + fc7.num_in) / ratio == pytest.approx(256, rel=0.02)
    assert factors([fc7], 4) == (pytest.approx(64 / 9), pytest.approx(4))
    assert solved(*factors([fc7], 8))[0] == pytest.approx(8)


def test_parameters_are_counted() -> None:
    alexnet, vgg = (row["here"] for row in parameters())
    assert sum(alexnet) == 61_100_840
    assert alexnet[1] == sum(narrow * (wide + 1) for wide, narrow in ((9216, 4096), (4096, 4096), (4096, 1000)))
    assert sum(vgg) == 138_357_544


def test_small_layers_compute_at_the_speed_of_alexnet() -> None:
    small, large = compute("cifar-quick").sample_s, compute("alexnet").sample_s
    assert small is not None
    assert large is not None
    assert 40 < large / small < 80, "as many times the operations"
