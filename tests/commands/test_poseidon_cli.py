"""`tutti reproduce poseidon`, in its quick form, and what its report is made of."""

import re
from pathlib import Path

import pytest

from command import Call
from reproductions.poseidon.claims import COST_BASED, DWBP, DWBP_SACP, LATE_WORKERS, PLAIN
from reproductions.poseidon.models import sample_seconds
from reproductions.poseidon.results import PoseidonResults
from reproductions.poseidon.run import QUICK, VARIANTS
from reproductions.poseidon.traffic import (
    RULES,
    count_parameters,
    formula_bytes,
    layer_shapes,
    published_factors,
    solve_factors,
    widths,
)
from reproductions.records import load
from tutti.launch.lab.lab import missing


def test_reproduce_quickly(call: Call, tmp_path: Path) -> None:
    ended = call("reproduce", "poseidon", "--quick", "--name", "again")
    assert ended.status == 0, ended.err
    folder = tmp_path / "runs" / "again"
    report = (folder / "report.md").read_text()
    figures = re.findall(r"\]\((\S+\.png)\)", report)
    assert figures == ["speed-up-1gbit.png", "staleness.png", "traffic.png"]
    assert all((folder / figure).stat().st_size > 10_000 for figure in figures)
    result = load(PoseidonResults, folder / "results.json")
    assert len(result.speed_ups) == len(QUICK.models) * len(QUICK.workers) * len(VARIANTS)
    ups = {name: result.speed_up("alexnet", "1gbit", name, 4) for name in (PLAIN, DWBP, DWBP_SACP, COST_BASED)}
    assert ups[PLAIN] < ups[DWBP] < 0.5 * ups[DWBP_SACP], "at 1 Gbit/s AlexNet's matrices are what takes long"
    assert ups[COST_BASED] >= 0.99 * ups[DWBP_SACP]
    even, one_slow, pauses = (result.step_seconds(cluster) for cluster in LATE_WORKERS)
    assert even[0] < one_slow[0] < pauses[0]
    assert pauses[3] < 0.95 * pauses[0]
    assert [row.rule for row in result.traffic] == list(RULES)
    assert all(abs(row.error) < 0.02 for row in result.traffic)
    statement = "AlexNet: share of the parameters in fully connected layers"
    assert f"| {statement} | 96.25% | 95.96% | agrees |" in report
    if missing() is None:
        (lab,) = result.lab
        shape = widths(QUICK.lab_narrowing)
        for rule in RULES:
            formula = formula_bytes(rule, shape, lab.workers, lab.batch)
            assert lab.sent_bytes[f"poseidon:rule={rule}"] == pytest.approx(formula, rel=0.02)
    else:
        assert "The lab was not used" in report


def test_the_published_factors_are_of_four_workers() -> None:
    workers, ratio = solve_factors()
    assert workers == pytest.approx(4, rel=0.01)
    fc7 = layer_shapes("AlexNet", 256)[1]
    assert fc7.num_out * fc7.num_in / (fc7.num_out + fc7.num_in) / ratio == pytest.approx(256, rel=0.02)
    assert published_factors([fc7], 4) == (pytest.approx(64 / 9), pytest.approx(4))
    assert solve_factors(*published_factors([fc7], 8))[0] == pytest.approx(8)


def test_parameters_are_counted() -> None:
    alexnet, vgg = (row.here for row in count_parameters())
    assert sum(alexnet) == 61_100_840
    assert alexnet[1] == sum(narrow * (wide + 1) for wide, narrow in ((9216, 4096), (4096, 4096), (4096, 1000)))
    assert sum(vgg) == 138_357_544


def test_small_layers_compute_at_the_speed_of_alexnet() -> None:
    assert 40 < sample_seconds("alexnet") / sample_seconds("cifar-quick") < 80, "as many times the operations"
