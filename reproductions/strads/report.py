"""The report on scheduled model parallelism: figures, tables and a verdict."""

import json
from pathlib import Path
from typing import Any

from tutti.cluster import format_time
from tutti.report.plots import pyplot

_COLOURS = {"round-robin": "#0072b2", "random": "#e69f00", "dynamic": "#009e73", "dynamic, greedy": "#cc79a7"}
_TITLES = {"lasso": "Lasso", "matrix": "Matrix factorisation"}


def write_report(result: dict[str, Any], folder: Path) -> str:
    """Draw the figures into `folder`; the report, in Markdown."""
    parts = [_head(result), _verdict(result), *(_part(result, what, folder) for what in _TITLES), _loads(result)]
    text = "\n".join([*parts, _assumed(result)])
    (folder / "report.md").write_text(text)
    return text


def report_only(folder: Path) -> None:
    """Rewrite the report and its figures from the results stored in `folder`."""
    write_report(json.loads((folder / "results.json").read_text()), folder)


def _head(result: dict[str, Any]) -> str:
    plan = result["plan"]
    lasso, matrix = plan["lasso"], plan["matrix"]
    quick = "\n**The quick form: it shows that all of it runs, and is too small to show more.**\n"
    return f"""# Strads: which parameters to update next

Lee et al. (2014) and Kim et al. (2016), as Kim (2016) shows them, split a model by a scheduler: in every round it picks
parameters that matter and do not depend on each other (*schedule*), workers find what those should be (*push*), and it
is committed (*pull*). Here with [`tutti.parallel.scheduler`](../../docs/strads.md): {plan["workers"]} processes on
{result["machine"]}, median of {plan["repeats"]}; and {plan["simulated"]} simulated workers.
`tutti reproduce strads` does it again.

- **Lasso**: {lasso["samples"]} samples, {lasso["features"]} features, of which {lasso["relevant"]} count. Half of the
  features have a correlation of 0.9 with the one before. λ is σ √(2 ln J) = {result["penalty"]:.2f}, whatever comes of
  it. Samples are spread over workers; a round updates 32 coefficients.
- **Matrix factorisation**: {matrix["rows"]} by {matrix["columns"]}, {matrix["entries"]} known entries, many of popular
  rows and columns; factors of rank {matrix["rank"]}, λ = {matrix["penalty"]:g}. A round finds 64 rows of either factor.

All orders look at the same number of candidates and refuse the same dependences. All run for as many rounds, in which
{plan["passes"]:g} passes over all blocks could be made if none were refused. Seconds are those of rounds, scheduling
included; computing the objective is not.
{quick if result["quick"] else ""}"""


def reached(row: dict[str, Any], objective: float) -> list[float] | None:
    """The first point at that objective, if any: rounds, updates, seconds, objective."""
    return next((point for point in row["points"] if point[3] <= objective), None)


def _in_turn(result: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    same = ("what", "where", "workers")
    rows: list[dict[str, Any]] = result["rows"]
    return next(each for each in rows if each["way"] == "round-robin" and all(each[key] == row[key] for key in same))


def times_as_fast(result: dict[str, Any], row: dict[str, Any]) -> float | None:
    """How many times as soon as round-robin this was where round-robin ended; None if it never was."""
    base = _in_turn(result, row)
    point = reached(row, base["points"][-1][3])
    return None if point is None or not point[2] else float(base["points"][-1][2] / point[2])


def _verdict(result: dict[str, Any]) -> str:
    lines = []
    for what, title in _TITLES.items():
        best = "dynamic" if what == "lasso" else "dynamic, greedy"
        rows = [row for row in result["rows"] if row["what"] == what and row["way"] == best]
        said = ", ".join(f"{_ratio(times_as_fast(result, row))} ({_place(row)})" for row in rows)
        lines.append(f"- {title}: the {best} order is where round-robin ends, so many times as soon: {said}.")
    diverged = [row for row in result["rows"] if "unchecked" in row["way"] and _diverged(row)]
    checked = sum("unchecked" in row["way"] for row in result["rows"])
    lines.append(f"- Without the check for dependence, {len(diverged)} of {checked} runs of Lasso diverge.")
    return "\n".join(["## Verdict\n", *lines, ""])


def _part(result: dict[str, Any], what: str, folder: Path) -> str:
    rows = [row for row in result["rows"] if row["what"] == what]
    _draw(rows, _TITLES[what], folder / f"{what}.png")
    lines = [
        f"## {_TITLES[what]}\n",
        f"![How far the objective is from the best, over time]({what}.png)\n",
        "| where | order | a round | objective at the end | updates until round-robin's | time until then | as fast |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        if _diverged(row):
            lines.append(f"| {_place(row)} | {row['way']} | – | diverges | – | – | – |")
            continue
        rounds, _, seconds, objective = row["points"][-1]
        point = reached(row, _in_turn(result, row)["points"][-1][3])
        cells = ["–", "–"] if point is None else [f"{point[1] / row['blocks']:.1f} passes", format_time(point[2])]
        ratio = _ratio(times_as_fast(result, row))
        a_round = format_time(seconds / rounds)
        lines.append(f"| {_place(row)} | {row['way']} | {a_round} | {objective:.3f} | {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines) + "\n"


def _loads(result: dict[str, Any]) -> str:
    lines = [
        "## Who does what\n",
        "Rows of the matrix are given to workers by how much work they are, and by how fast workers were of late.\n"
        f"Virtual time of the same rounds on {result['plan']['simulated']} simulated workers, a hundred times slower,\n"
        "so that computing is what counts:\n",
        "| workers | by work and pace | by number, and pace |",
        "| --- | ---: | ---: |",
    ]
    for slow in (False, True):
        seconds = {row["by_load"]: row["seconds"] for row in result["loads"] if row["slow"] == slow}
        name = f"one takes {result['slow']:g} times as long" if slow else "equal"
        lines.append(f"| {name} | {format_time(seconds[True])} | {format_time(seconds[False])} |")
    return "\n".join(lines) + "\n"


def _assumed(result: dict[str, Any]) -> str:
    return f"""## What is assumed

Simulated workers compute {result["flops"]:.0e} operations a second, each on a host of its own with {result["link"]}.
An update of a coefficient is four operations for every sample, of a row of a factor 2 K² for every entry and K³; a draw
takes two for every block, and a comparison of two candidates 8. Python's own time is not in it: in real runs it is most
of a round.
"""


def _diverged(row: dict[str, Any]) -> bool:
    return not row["points"] or row["points"][-1][3] > row["points"][0][3]


def _ratio(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} ×"


def _place(row: dict[str, Any]) -> str:
    where = {"shared_memory": "shared memory", "process_group": "sockets"}.get(row["where"], row["where"])
    return f"{row['workers']} simulated" if where == "simulated" else f"{row['workers']} processes, {where}"


def _draw(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    plt = pyplot()
    places = list(dict.fromkeys(_place(row) for row in rows))
    figure, axes = plt.subplots(1, len(places), figsize=(4.6 * len(places), 4.2), layout="constrained", squeeze=False)
    shown = [row for row in rows if row["way"] in _COLOURS]
    best = min(point[3] for row in shown for point in row["points"])
    for place, axis in zip(places, axes[0], strict=True):
        for row in shown:
            if _place(row) == place:
                points = [(point[2], point[3] / best - 1) for point in row["points"] if point[3] > best * (1 + 1e-9)]
                axis.plot(*zip(*points, strict=True), color=_COLOURS[row["way"]], label=row["way"])
        axis.set(yscale="log", xlabel="seconds", title=place)
        axis.grid(alpha=0.2)
    axes[0][0].set_ylabel("objective above the best, relative")
    axes[0][-1].legend(frameon=False, fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    plt.close(figure)
