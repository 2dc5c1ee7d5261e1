"""The reproduction on peers and gossip at the command line, in its quick form."""

import json
import re
from pathlib import Path

from command import Call

PARAMETER_BYTES = 4 * 4810


def test_reproduce_decentralised_quickly(call: Call, tmp_path: Path) -> None:
    ended = call("reproduce", "decentralised", "--quick", "--name", "again")
    assert ended.status == 0, ended.err
    folder = tmp_path / "runs" / "again"
    report = (folder / "report.md").read_text()
    assert re.search(r"\| 1 server \| `ps:async,servers=1` \| 0\.025 \| \d+\.\d% \| \d+\.\d \|", report)
    assert re.search(r"\| gossip, torus \| `gossip:graph=torus` \| \d+\.\d+ % \| [+-]\d\.\d\d \|", report)
    figures = re.findall(r"\]\((\S+\.png)\)", report)
    assert figures == ["sites.png", "gossip.png"]
    assert all((folder / figure).stat().st_size > 10_000 for figure in figures)
    result = json.loads((folder / "results.json").read_text())
    runs = {(run["part"], run["way"]): run for run in result["runs"]}
    assert len(runs) == 9 + 6
    peers = runs["sites", "peers, threshold with residual"]
    assert peers["seconds"] < 0.5 * runs["sites", "all-reduce"]["seconds"]  # Nobody waits for a message.
    assert len(set(peers["steps"])) == 1 < len(set(runs["sites", "1 server"]["steps"]))
    assert sum(runs["sites", "1 server"]["steps"]) >= sum(peers["steps"])
    assert 3 * PARAMETER_BYTES < runs["sites", "peers, exact"]["step_bytes"] < 3.2 * PARAMETER_BYTES
    sizes = {row["name"]: row["step_bytes"] for row in result["sizes"]}
    for graph, messages in (("ring", 2), ("exponential", 1), ("random pairs", 1)):
        assert max(sizes[f"gossip, {graph}"]) < 1.02 * messages * PARAMETER_BYTES
        assert len(set(sizes[f"gossip, {graph}"])) == 1
    assert sizes["peers, exact"][-1] > 2.3 * sizes["peers, exact"][0]  # 7 others instead of 3.
