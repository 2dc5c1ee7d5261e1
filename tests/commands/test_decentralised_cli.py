"""The reproduction on peers and gossip at the command line, in its quick form."""

import re
from pathlib import Path

from command import Call
from reproductions.decentralised.results import ALL_REDUCE, EXACT, RESIDUAL, DecentralisedResults
from reproductions.records import load

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
    result = load(DecentralisedResults, folder / "results.json")
    runs = {(run.task, run.method): run for run in result.runs}
    assert len(runs) == 9 + 6
    peers = runs["sites", RESIDUAL]
    assert peers.seconds < 0.5 * runs["sites", ALL_REDUCE].seconds  # Nobody waits for a message.
    assert len(set(peers.steps)) == 1 < len(set(runs["sites", "1 server"].steps))
    assert sum(runs["sites", "1 server"].steps) >= sum(peers.steps)
    assert 3 * PARAMETER_BYTES < runs["sites", EXACT].bytes_per_step < 3.2 * PARAMETER_BYTES
    traffic = {row.method: row.bytes_per_step for row in result.traffic}
    for graph, messages in (("ring", 2), ("exponential", 1), ("random pairs", 1)):
        assert max(traffic[f"gossip, {graph}"]) < 1.02 * messages * PARAMETER_BYTES
        assert len(set(traffic[f"gossip, {graph}"])) == 1
    assert traffic[EXACT][-1] > 2.3 * traffic[EXACT][0]  # 7 others instead of 3.
