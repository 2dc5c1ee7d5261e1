"""The report on staleness: tables, curves and a verdict on each claim, from what was measured."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reproductions.staleness.claims import LOCKSTEP, clear_points, seconds_to, verdict
from tutti.cluster import format_time
from tutti.report.plots import pyplot

_LINES = {
    "BSP": ("#000000", "-"), "SSP 1": ("#56b4e9", "-"), "SSP 3": ("#0072b2", "-"), "SSP 10": ("#003f6b", "--"),
    "SSP 3, eager": ("#0072b2", ":"),
    "soft-sync N/2": ("#009e73", "-"), "async, rate / N": ("#e69f00", "-"), "async, whole rate": ("#d55e00", ":"),
    "async, aware": ("#cc79a7", "--"),
}  # fmt: skip

_IN_WORDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "even": lambda it: f"*even*: every step is drawn with a jitter of {it['jitter']:.0%}",
    "one slow": lambda it: f"*one slow*: besides, the last worker always takes {it['slow']:g} times as long",
    "pauses": lambda it: (
        f"*pauses*: besides, every worker stops at random, every {format_time(it['pause_every_s'])} for "
        f"{format_time(it['pause_s'])} on average"
    ),
}


def write_report(result: dict[str, Any], folder: Path) -> str:
    """Draw the figures into `folder`; the report, in Markdown."""
    sections = [_head(result), _rates(result), verdict(result)]
    for number, part in enumerate(result["plan"]):
        if part["name"] not in (before["name"] for before in result["plan"][:number]):
            sections.append(f"## {part['name']}\n")
        sections.append(_part(result, part, folder))
    text = "\n".join([*sections, _limits(result)])
    (folder / "report.md").write_text(text)
    return text


def report_only(folder: Path) -> None:
    """Rewrite the report and its figures from the results stored in `folder`."""
    write_report(json.loads((folder / "results.json").read_text()), folder)


def _head(result: dict[str, Any]) -> str:
    clusters = dict.fromkeys(name for part in result["plan"] for name in part["clusters"])
    listed = ";\n".join(f"- {_IN_WORDS[name](result)}" for name in clusters)
    cut = ";\n".join(dict.fromkeys(_size_of(part) for part in result["plan"]))
    quick = "\n**The quick form: it shows that all of it runs, and is too short to show more.**\n"
    step = format_time(result["step_s"])
    return f"""# Staleness: lockstep, a bound, or none

Dong's slides on distributed deep learning say that asynchronous SGD has the higher throughput, and that stale gradients
slow its convergence down or prevent it; that updates scaled down by their staleness, soft synchronisation and a bound
on staleness help. Kim (2016) calls lockstep (BSP) safe and slow, async fast and risky, and bounded staleness (SSP, Ho
et al. 2013) the best of both. Here all of them on Tutti's parameter servers.
{quick if result["quick"] else ""}
Gradients are real and time is virtual (`tutti.simulate`). A worker computes {step} for a step, whatever its batch;
every host has {result["link"]}; one more rank for every eight workers serves, and does nothing else. The clusters:

{listed}.

Data is a random part of the recipe's, so that all of it runs in half an hour:

{cut}.

An *epoch* is as many samples as there are to train on, whoever computes them: under soft-sync and async a fast worker
does more of them than a slow one. Accuracy on the way is that of rank 0's own copy of the parameters, which may be as
stale as any worker's; testing takes no virtual time. The last point of a curve is what the servers have at the end.

One seed. Measured on {result["machine"]}. `tutti reproduce staleness` does it again.
"""


def _size_of(part: dict[str, Any]) -> str:
    steps = part["num_train"] // part["batch"]
    return (
        f"- {part['name']}: {part['num_train']:,} samples to train on, {part['num_test']:,} to test on, "
        f"{part['epochs']} epochs, {part['batch']} samples in a batch over all workers, which makes {steps} steps of "
        "lockstep to an epoch"
    )


def _rates(result: dict[str, Any]) -> str:
    rates = ", ".join(dict.fromkeys(f"{part['rate']:g} for {part['name']}" for part in result["plan"]))
    momentum = ", ".join(part["name"] for part in result["plan"] if part["momentum"])
    besides = f" What momentum does is shown apart: {momentum}." if momentum else ""
    return f"""## Learning rates

Dong writes W ← W - Σ λ ΔW over N updates, or over S of them, and leaves λ open but for scaling it by staleness. On
parameter servers each step is the optimiser's, on the mean of the updates in it. Under BSP and SSP that is one of
every worker; under soft-sync it is half of them and under async a single one, so the servers make 2 and N steps where
lockstep makes one, and with the same rate they would go 2 and N times as far in an epoch. So one rule sets the rates
of all cells, and none has one of its own:

- a step made of k of N updates has k / N of the rate for lockstep ({rates}): all of it under BSP and SSP, half under
  *soft-sync N/2*, an N-th under *async, rate / N*;
- *async, whole rate* has all of it in every step: what happens if only the word for the strategy is changed;
- *async, aware* has all of it too, and each update is scaled by 1 / its staleness, as Zhang et al. (2016) have it.

SGD is plain, as in Dong's formula, which has no momentum; weight decay is the recipe's.{besides}
That choice was made after a look at both. With the recipe's own momentum of 0.9, which makes its rate worth ten times
as much, most of what is stale fell apart on mnist-mlp; plain rates of 0.1 to 0.3 hurt it too. So 0.05 is mild, and
kinder to staleness than what suits lockstep best: with each rule at its own best rate, lockstep might fare better.
"""


def _part(result: dict[str, Any], part: dict[str, Any], folder: Path) -> str:
    lines = []
    for workers in part["workers"]:
        runs = [run for run in result["runs"] if (run["part"], run["workers"]) == (part["name"], workers)]
        figure = f"{part['name'].replace(', ', '-').replace(' ', '-')}-{workers}.png"
        _draw(f"{part['name']}, {workers} workers", part, runs, folder / figure)
        what = f"Accuracy of {part['name']} with {workers} workers over epochs and seconds, and staleness"
        lines += [f"![{what}]({figure})\n", _table(part, workers, runs, clear_points(result, part["name"]))]
    return "\n".join(lines)


def _table(part: dict[str, Any], workers: int, runs: list[dict[str, Any]], close: float) -> str:
    """A row for each rule: what it learnt, how fast, and how stale its updates were, by cluster."""
    lines = [
        f"{workers} workers: test accuracy after {part['epochs']} epochs · virtual seconds of an epoch · those until "
        f"accuracy first came within {close:.1f} points of where BSP ended · mean (and largest) staleness:\n",
        f"| rule | rate | {' | '.join(part['clusters'])} |",
        f"| --- | ---: |{' ---: |' * len(part['clusters'])}",
    ]
    for rule in part["rules"]:
        by_cluster = {run["cluster"]: run for run in runs if run["rule"] == rule["name"]}
        cells = []
        for name in part["clusters"]:
            run, lockstep = by_cluster[name], _find(runs, name, LOCKSTEP)
            to_s = seconds_to(run, lockstep["accuracy"] - close / 100)
            reached = "never" if to_s is None else f"{to_s:.2f} s"
            cells.append(f"{run['accuracy']:.1%} · {run['epoch_s']:.2f} s · {reached} · {_staleness(run)}")
        lines.append(
            f"| {rule['name']} | {by_cluster[part['clusters'][0]]['learning_rate']:.3g} | {' | '.join(cells)} |"
        )
    return "\n".join(lines) + "\n"


def _find(runs: list[dict[str, Any]], cluster: str, rule: str) -> dict[str, Any]:
    return next(run for run in runs if (run["cluster"], run["rule"]) == (cluster, rule))


def _staleness(run: dict[str, Any]) -> str:
    counts = {int(number): count for number, count in run["staleness"].items()}
    mean = sum(number * count for number, count in counts.items()) / sum(counts.values())
    return f"{mean:.1f} ({max(counts)})"


def _draw(title: str, part: dict[str, Any], runs: list[dict[str, Any]], path: Path) -> None:
    """A column for each cluster: accuracy over epochs, accuracy over virtual seconds, staleness of updates."""
    plt = pyplot()
    columns = len(part["clusters"])
    figure, axes = plt.subplots(
        3, columns, figsize=(2.6 + 3.7 * columns, 9), sharey="row", sharex=False, layout="constrained", squeeze=False
    )
    for column, cluster in enumerate(part["clusters"]):
        over_epochs, over_seconds, stale = axes[:, column]
        for rule in part["rules"]:
            run = _find(runs, cluster, rule["name"])
            colour, dashes = _LINES[rule["name"]]
            shown = {"color": colour, "linestyle": dashes, "linewidth": 2.2 if rule["name"] == LOCKSTEP else 1.4}
            accuracy = [100 * point[2] for point in run["points"]]
            label = rule["name"] if column == 0 else None
            over_epochs.plot([point[0] for point in run["points"]], accuracy, label=label, **shown)
            over_seconds.plot([point[1] for point in run["points"]], accuracy, **shown)
            stale.plot(*_shares(run), marker="o", markersize=6 if rule["name"] == LOCKSTEP else 2.5, **shown)
        over_epochs.set(title=cluster, xlabel="epochs")
        over_seconds.set(xlabel="virtual seconds")
        over_seconds.set_xlim(left=0)
        stale.set(xlabel="staleness of an update (steps of the servers)")
        stale.set_xscale("symlog", linthresh=1, linscale=0.4)
        stale.set_xlim(left=-0.2)
        ticks = [tick for tick in (0, 1, 2, 4, 8, 16, 32, 64, 128) if tick <= max(2, *_largest(runs))]
        stale.set_xticks(ticks, [str(tick) for tick in ticks])
        stale.minorticks_off()
    for row, label in enumerate(("test accuracy (%)", "test accuracy (%)", "updates (%)")):
        axes[row, 0].set_ylabel(label)
    for axis in axes.flat:
        axis.grid(alpha=0.2)
    figure.suptitle(title)
    figure.legend(frameon=False, fontsize=9, loc="outside right center")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _shares(run: dict[str, Any]) -> tuple[list[int], list[float]]:
    total = sum(run["staleness"].values())
    return [int(number) for number in run["staleness"]], [100 * count / total for count in run["staleness"].values()]


def _largest(runs: list[dict[str, Any]]) -> list[int]:
    return [max(map(int, run["staleness"])) for run in runs]


def _limits(result: dict[str, Any]) -> str:
    fewest = min(part["num_test"] for part in result["plan"])
    return f"""## What this cannot show

These are the first epochs of small models on parts of their data, with one seed: where a recipe would end is not known
from them, and curves that rise and fall make the end of one a matter of luck, too. An accuracy measured on {fewest}
samples is itself uncertain, by a standard error of up to {50 / fewest**0.5:.1f} points. Under SSP a worker reads only
when what it has is too old, as Kim (2016) describes it, and does not see its own updates before it does: so its
parameters are old on even workers too, by up to the bound. That the servers compute costs no virtual time.
{_left_out(result)}
"""


def _left_out(result: dict[str, Any]) -> str:
    """What was done for some recipes and sizes only."""
    clusters = dict.fromkeys(name for part in result["plan"] for name in part["clusters"])
    rules = dict.fromkeys(rule["name"] for part in result["plan"] for rule in part["rules"])
    gaps = []
    for part in result["plan"]:
        own = [rule["name"] for rule in part["rules"]]
        missing = [name for name in clusters if name not in part["clusters"]] + [it for it in rules if it not in own]
        sizes = " and ".join(map(str, part["workers"]))
        gaps += [f"{part['name']} on {sizes} workers is without {', '.join(missing)}"] if missing else []
    return f"To keep it short, {'; '.join(gaps)}." if gaps else ""
