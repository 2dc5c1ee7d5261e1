"""`tutti reproduce horovod-scaling`."""

import re
from pathlib import Path

import pytest

import tutti.bench.fidelity
from command import Call
from reproductions.horovod_scaling.report import write_report
from reproductions.horovod_scaling.results import (
    HorovodConfig,
    HorovodResults,
    SimulatedScaling,
    SynchronisationMethod,
)
from reproductions.horovod_scaling.run import METHODS, QUICK
from reproductions.records import load
from tutti.launch.lab.lab import missing


def test_reproduce_quickly(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tutti.bench.fidelity, "HOSTS", 2)
    ended = call("reproduce", "horovod-scaling", "--quick", "--name", "again")
    assert ended.status == 0, ended.err
    folder = tmp_path / "runs" / "again"
    report = (folder / "report.md").read_text()
    figures = re.findall(r"\]\((\S+\.png)\)", report)
    assert set(figures) == {"throughput.png", "epoch.png", "servers.png"}
    assert all((folder / figure).stat().st_size > 10_000 for figure in figures)
    result = load(HorovodResults, folder / "results.json")
    assert len(result.simulated) == len(QUICK.models) * len(QUICK.batches) * len(QUICK.workers) * len(METHODS)
    ring = result.select(method="ring all-reduce")
    assert all(0.9 < row.efficiency <= 1 for row in ring), "100 Gbit/s are more than a K80 can use"
    assert [row.efficiency for row in ring if row.workers == 1] == [pytest.approx(1)] * 4
    assert "AlexNet, Horovod: throughput and latency almost linear" in report
    if missing() is None:
        first = result.lab[0]
        assert (first.method, first.same_bits) == ("ring all-reduce", True)


def test_the_report_says_where_a_server_is_the_bottleneck(tmp_path: Path) -> None:
    shares = {"ring": {"alexnet": 1.0, "googlenet": 1.0}, "one server": {"alexnet": 0.1, "googlenet": 0.3}}
    rows = tuple(
        SimulatedScaling(
            model=model, batch_size=64, method=method, workers=workers, images_per_s=50 * workers * efficiency,
            efficiency=efficiency, step_s=1.0, bytes_per_worker=0.0, num_messages=0, wall_s=0.0,
        )
        for method, by_model in shares.items()
        for model, share in by_model.items()
        for workers, efficiency in ((1, 1.0), (4, max(share, 0.25)), (16, share))
    )  # fmt: skip
    result = HorovodResults(
        machine="m",
        quick=False,
        config=HorovodConfig(models=tuple(shares["ring"]), batches=(64,), workers=(1, 4, 16)),
        methods=(
            SynchronisationMethod("ring", "ring"),
            SynchronisationMethod("one server", "ps", num_servers=1),
        ),
        lab_missing="root",
        lab=(),
        simulated=rows,
    )
    report = write_report(result, tmp_path)
    assert "| AlexNet, one parameter server: poor scalability | no number | efficiency 10.0% with 16 workers" in report
    assert "| AlexNet has the lowest efficiency | agrees |" in report
    assert "throughput of ring relative to one server: 10.00 × with AlexNet, 3.33 × with GoogLeNet" in report
    assert "the larger batch size is best" not in report, "one batch size says nothing of it"
    assert "The lab was not used: root" in report
