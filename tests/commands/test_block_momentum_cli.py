"""The reproduction on block momentum at the command line, in its quick form."""

import json
import re
from pathlib import Path

from command import Call


def test_reproduce_block_momentum_quickly(call: Call, tmp_path: Path) -> None:
    ended = call("reproduce", "block-momentum", "--quick", "--name", "again")
    assert ended.status == 0, ended.err
    folder = tmp_path / "runs" / "again"
    report = (folder / "report.md").read_text()
    assert re.search(r"\| BMUF and 1-bit \| \d+\.\d+%, [\d.]+s \|", report)
    assert re.search(r"- 16 workers: averaging [+-]\d+\.\d+ points, BMUF [+-]\d+\.\d+ points", report)
    assert (folder / "digits.png").stat().st_size > 10_000
    runs = {(r["task"], r["method"]): r for r in json.loads((folder / "results.json").read_text())["runs"]}
    assert len(runs) == 10
    assert runs["digits", "BMUF"]["value"] > runs["digits", "averaging"]["value"]  # Momentum makes up for the mean.
    assert runs["digits", "BMUF and 1-bit"]["bytes_per_step"] < 0.5 * runs["digits", "BMUF"]["bytes_per_step"]
    assert runs["digits", "averaging"]["points"][-1][1] < 0.3 * runs["digits", "single worker"]["points"][-1][1]
