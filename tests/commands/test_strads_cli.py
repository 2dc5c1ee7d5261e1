"""The reproduction of Strads in its quick form, and the examples of the pages on schedulers and branches."""

import re
from pathlib import Path
from typing import Any

import torch

import tutti
from command import Call
from reproductions.records import load
from reproductions.strads.results import SIMULATED, StradsResults

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
    result = load(StradsResults, folder / "results.json")
    assert len(result.runs) == 3 + 4 + 5 + 4
    simulated = {(run.problem, run.policy): run for run in result.runs if run.transport == SIMULATED}
    in_turn = simulated["lasso", "round-robin"].points[-1]
    reached = simulated["lasso", "dynamic"].first_at(in_turn.objective)
    assert reached is not None
    assert 2 * reached.seconds <= in_turn.seconds  # In virtual time, which is the same every time.
    for run in result.runs:  # Real and simulated ranks do the same.
        expected = simulated[run.problem, run.policy].points[-1].objective
        assert abs(run.points[-1].objective / expected - 1) < 1e-9
    assert [(row.slow_worker, row.by_work) for row in result.balance] == [
        (slow, by_work) for slow in (False, True) for by_work in (True, False)
    ]


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
