"""The reproduction on staleness at the command line, in its quick form."""

import json
import re
from pathlib import Path

from command import Call


def test_reproduce_staleness_quickly(call: Call, tmp_path: Path) -> None:
    ended = call("reproduce", "staleness", "--quick", "--name", "again")
    assert ended.status == 0, ended.err
    folder = tmp_path / "runs" / "again"
    report = (folder / "report.md").read_text()
    assert re.search(r"\| async, rate / N \| 0\.025 \| \d+\.\d% · \d\.\d\d s", report)
    for figure in re.findall(r"\]\((\S+\.png)\)", report):
        assert (folder / figure).stat().st_size > 10_000
    runs = {run["rule"]: run for run in json.loads((folder / "results.json").read_text())["runs"]}
    assert set(runs) == {"BSP", "SSP 3", "async, rate / N"}
    assert set(runs["BSP"]["staleness"]) == {"0"}
    assert max(map(int, runs["SSP 3"]["staleness"])) <= 3
    assert runs["async, rate / N"]["epoch_s"] < 0.8 * runs["BSP"]["epoch_s"]  # One is slow: only lockstep pays for it.
    assert runs["BSP"]["epochs"] == 2.0
