"""The reproduction of Strads in its quick form, and the examples of the pages on schedulers and branches."""

import json
import re
from pathlib import Path
from typing import Any

import torch

import tutti
from command import Call

DOCS = Path(__file__).parents[2] / "docs"


def test_reproduce_strads_quickly(call: Call, tmp_path: Path) -> None:
    ended = call("reproduce", "strads", "--quick", "--name", "again")
    assert ended.status == 0, ended.err
    folder = tmp_path / "runs" / "again"
    report = (folder / "report.md").read_text()
    assert re.search(r"\| 2 processes, shared memory \| dynamic \| \S+ \| \d+\.\d+ \| \d\.\d passes \| \S+ \|", report)
    figures = re.findall(r"\]\((\S+\.png)\)", report)
    assert figures == ["lasso.png", "matrix.png"]
    assert all((folder / figure).stat().st_size > 10_000 for figure in figures)
    rows = json.loads((folder / "results.json").read_text())["rows"]
    assert len(rows) == 3 + 4 + 5 + 4
    ends = {(row["where"], row["what"], row["way"]): row["points"][-1] for row in rows}
    simulated = {(row["what"], row["way"]): row["points"] for row in rows if row["where"] == "simulated"}
    in_turn = simulated["lasso", "round-robin"][-1]
    reached = next(point for point in simulated["lasso", "dynamic"] if point[3] <= in_turn[3])
    assert 2 * reached[2] <= in_turn[2]  # In virtual time, which is the same every time.
    for where, what, way in ends:  # Real and simulated ranks do the same.
        assert abs(ends[where, what, way][3] / ends["simulated", what, way][3] - 1) < 1e-9
    loads = json.loads((folder / "results.json").read_text())["loads"]
    assert [(row["slow"], row["by_load"]) for row in loads] == [(slow, load) for slow in (0, 1) for load in (1, 0)]


def run_example(example: str, workers: int, *args: Any) -> tuple[list[Any], dict[str, Any]]:
    """An example of the documentation, on simulated ranks instead of processes; their results, and its names."""
    body, launched, last = example.partition("results = tutti.launch(")
    assert launched, example
    names: dict[str, Any] = {"__name__": "example"}
    exec(body.removesuffix('if __name__ == "__main__":\n    '), names)
    return tutti.simulate(names[last.split(",")[0]], *args, workers=workers).results, names


def examples(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def test_the_examples_of_schedulers() -> None:
    lasso, own = examples("strads.md")
    results, _ = run_example(lasso, 2)
    objective, coefficients = results[0]
    assert objective < 30
    assert coefficients[:5].min() > 0.9
    assert coefficients[5:].abs().max() < 0.1
    solutions, _ = run_example(own, 3)
    torch.manual_seed(0)
    root = torch.randn(300, 300, dtype=torch.float64) / 300**0.5
    wanted = torch.linalg.solve(root @ root.T + torch.eye(300), torch.ones(300, dtype=torch.float64))
    for x in solutions:
        torch.testing.assert_close(x, wanted, rtol=1e-6, atol=1e-6)


def test_the_example_of_branches() -> None:
    (example,) = examples("branches.md")
    (wanted,), _ = run_example(example, 1, 2)
    for parameters in run_example(example, 2, 2)[0]:
        for got, want in zip(parameters, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
