"""The report on block momentum: tables as in Kim (2016), curves, and a verdict, from what was measured."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

from tutti.cluster import format_size, format_time
from tutti.report.plots import pyplot

_SINGLE = "single worker"
_DIVERGED = 4.0
"""Times the perplexity of a single worker."""
_COLOURS = {
    _SINGLE: "#000000", "averaging": "#e69f00", "BMUF": "#0072b2", "1-bit": "#d55e00", "BMUF and 1-bit": "#009e73",
}  # fmt: skip


def write_report(result: dict[str, Any], folder: Path) -> str:
    """Draw the figures into `folder`; the report, in Markdown."""
    sections = [_head(result)]
    for number, part in enumerate(result["plan"]):
        runs = [run for run in result["runs"] if run["part"] == part["name"]]
        show = _to_target if part["target"] else _seeds if part["seeds"] > 1 else _table
        sections.append(show(part, runs))
        if number == 0:
            _draw(part, runs, folder / f"{part['name']}.png")
            sections.append(f"![{part['name']}]({part['name']}.png)\n")
    text = "\n".join([*sections, *([] if result["quick"] else [_limits()])])
    (folder / "report.md").write_text(text)
    return text


def report_only(folder: Path) -> None:
    """Rewrite the report and its figures from the results stored in `folder`."""
    write_report(json.loads((folder / "results.json").read_text()), folder)


def _head(result: dict[str, Any]) -> str:
    quick = "\n**The quick form: it shows that all of it runs, and is too short to show more.**\n"
    return f"""# Block momentum: to communicate less often

Kim (2016) shows how CNTK trains an LSTM on 4 to 64 GPUs: with 1-bit SGD, which communicates less (Seide et al. 2014),
and with blockwise model-update filtering, BMUF, which communicates less often (Chen & Huo 2016). In his table of word
error rates, from Seide's talk on CNTK, a single GPU has 11.08 %; 1-bit SGD has 10.79, 10.59 and 11.02 on 4, 8 and 16
GPUs; BMUF has 10.82, 10.82, 10.85, 10.92 and 11.08 on 4, 8, 16, 32 and 64. Dong's slides say that plain averaging
does worse the less often models are averaged.
{quick if result["quick"] else ""}
Here the same in small: all methods train on the same number of samples, so that more workers mean fewer steps of each.
Gradients are real and time is virtual (`tutti.simulate`): a worker computes {format_time(result["step_s"])} for a step
of its own batch, and hosts have links of 100 Mbit/s and {result["delay"]}. The optimiser is plain SGD, its rate falling
to 0 in a straight line, gradients clipped to a norm of 1, and the same for all, but for 1-bit SGD, whose rate grows
with the root of the number of workers, as its batch does. BMUF has Nesterov momentum of 1 - 1/N for N workers and a
block rate of 1.

Measured on {result["machine"]}. `tutti reproduce block-momentum` does it again.
"""


def _better(run: dict[str, Any]) -> str:
    return f"{run['value']:.3f}" if run["metric"] == "perplexity" else f"{run['value']:.2%}"


def _entry(run: dict[str, Any]) -> str:
    """How good it was in the end, and how long that took."""
    return f"{_better(run)}, {format_time(run['points'][-1][1])}"


def _table(part: dict[str, Any], runs: list[dict[str, Any]]) -> str:
    metric = runs[0]["metric"]
    found = {(run["method"], run["workers"]): run for run in runs}
    single = found[_SINGLE, 1]
    head = " | ".join(f"{workers} workers" for workers in part["workers"])
    rows = [f"| {_SINGLE} | {_entry(single)} |" + " |" * (len(part["workers"]) - 1)]
    for method in part["methods"][1:]:
        mine = [found.get((method, workers)) for workers in part["workers"]]
        cells = " | ".join("" if run is None else _entry(run) for run in mine)
        rows.append(f"| {method} | {cells} |")
    most = part["workers"][-1]
    bytes_sent = ", ".join(
        f"{method} {format_size(found[method, most]['bytes_per_step'])}"
        for method in part["methods"][1:]
        if (method, most) in found
    )
    return f"""## {part["name"]}

{part["epochs"]} epochs, {part["batch"]} samples in a worker's batch, blocks of {part["every"]} steps, a rate of
{part["rate"]:g}. Test {metric} at the end, and the time that took:

| | {head} |
| --- |{" --- |" * len(part["workers"])}
{chr(10).join(rows)}

A worker of {most} sends in a step, on average: {bytes_sent}.

{_verdict(part, runs, single)}
"""


def _verdict(part: dict[str, Any], runs: list[dict[str, Any]], single: dict[str, Any]) -> str:
    """How far every method is from a single worker, on every number of workers."""
    lines = []
    for workers in part["workers"]:
        of = {run["method"]: run["value"] for run in runs if run["workers"] == workers}
        lost = [f"{method} {_away(value, single)}" for method, value in of.items()]
        lines.append(f"- {workers} workers: {', '.join(lost)} against a single worker.")
    return "\n".join(lines)


def _away(value: float, single: dict[str, Any]) -> str:
    if single["metric"] == "accuracy":
        return f"{100 * (value - single['value']):+.2f} points"
    times = value / single["value"]
    return f"{times - 1:+.1%}" if times < _DIVERGED else "diverges"


def _seeds(part: dict[str, Any], runs: list[dict[str, Any]]) -> str:
    rows, means = [], {}
    for method in part["methods"]:
        mine = [run for run in runs if run["method"] == method]
        means[method] = mean(run["value"] for run in mine)
        each = " | ".join(_better(run) for run in mine)
        seconds = format_time(mean(run["points"][-1][1] for run in mine))
        rows.append(f"| {method} | `{mine[0]['strategy']}` | {each} | {means[method]:.2%} | {seconds} |")
    first = part["methods"][0]
    away = "; ".join(f"{method} {100 * (means[method] - means[first]):+.2f}" for method in part["methods"][1:])
    seeds = " | ".join(f"seed {seed}" for seed in range(part["seeds"]))
    return f"""## {part["name"]}, {part["workers"][0]} workers

{part["epochs"]} epochs of all 60,000 digits, {part["batch"]} samples in a worker's batch, a rate of {part["rate"]:g}.
Test accuracy:

| | strategy | {seeds} | mean | time |
| --- | --- |{" --- |" * part["seeds"]} --- | --- |
{chr(10).join(rows)}

Points away from {first}, which is what DDP computes, on average: {away}.
"""


def _to_target(part: dict[str, Any], runs: list[dict[str, Any]]) -> str:
    """How long it took until the test accuracy was high enough, for the first time."""
    rows, times = [], []
    for run in runs:
        reached = next((point for point in run["points"] if point[2] >= part["target"]), None)
        if reached is None:
            rows.append(f"| {run['method']} | `{run['strategy']}` | not in {part['epochs']} epochs | |")
            continue
        steps = round(reached[0] / part["epochs"] * run["steps"])
        times.append(reached[1])
        rows.append(f"| {run['method']} | `{run['strategy']}` | {steps} | {format_time(reached[1])} |")
    ratio = f"{times[0] / times[1]:.0f} times shorter." if len(times) == len(runs) == 2 else ""
    return f"""## {part["workers"][0]} workers, links of {part["link"]}, until {part["target"]:.0%}

The same model, {part["batch"]} samples in a worker's batch, tested {part["tests"]} times an epoch:

| | strategy | steps | time |
| --- | --- | --- | --- |
{chr(10).join(rows)}

{ratio}
"""


def _draw(part: dict[str, Any], runs: list[dict[str, Any]], path: Path) -> None:
    """Quality against epochs and against time: a panel for each number of workers."""
    plt = pyplot()
    sizes = part["workers"]
    figure, axes = plt.subplots(
        2, len(sizes), figsize=(3.4 * len(sizes) + 1, 7), sharey=True, layout="constrained", squeeze=False
    )
    for column, workers in enumerate(sizes):
        for method in part["methods"]:
            run = next((run for run in runs if run["method"] == method and run["workers"] in (workers, 1)), None)
            if run is None:
                continue
            epochs, seconds, values = zip(*run["points"], strict=True)
            style = {"color": _COLOURS[method], "marker": "o", "markersize": 3, "linewidth": 1.5, "label": method}
            axes[0][column].plot(epochs, values, **style)
            axes[1][column].plot(seconds, values, **style)
        axes[0][column].set(title=f"{workers} workers", xlabel="epochs", xticks=range(1, part["epochs"] + 1))
        axes[1][column].set(xlabel="virtual seconds", xscale="log")
        axes[1][column].set_xticks([30, 100, 300, 1000, 3000], labels=["30", "100", "300", "1000", "3000"])
        axes[1][column].minorticks_off()
    metric = runs[0]["metric"]
    for row in axes:
        row[0].set_ylabel(f"test {metric}")
        if metric == "perplexity":
            row[0].set(yscale="log", ylim=(4.7, 20))  # What diverges leaves the picture.
            row[0].set_yticks([5, 6, 8, 10, 15], labels=["5", "6", "8", "10", "15"])
            row[0].minorticks_off()
    handles = {line.get_label(): line for axis in axes[0] for line in axis.get_lines()}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _limits() -> str:
    return """## What this is not

CNTK's LSTM was trained on hours of speech, far more than a megabyte of Shakespeare: here 64 workers share so little
text that a whole epoch is a few dozen blocks, and momentum needs about as many blocks as there are workers to come to
its speed. The model is small, and so are its gradients; on this link they take longer than a step all the same.
One seed, but where a table shows more.
"""
