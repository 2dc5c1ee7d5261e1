"""Figures of the report on training without a parameter server."""

from pathlib import Path
from typing import Any

from reproductions.decentralised.results import (
    ALL_REDUCE,
    EXACT,
    EXACT_SMALL_INBOX,
    NO_RESIDUAL,
    RESIDUAL,
    SERVERS,
    DecentralisedResults,
    DecentralisedRun,
)
from tutti.report.plots import pyplot

_LINES = {
    ALL_REDUCE: ("#000000", "-"), SERVERS[0]: ("#e69f00", "-"), SERVERS[1]: ("#e69f00", ":"),
    SERVERS[2]: ("#d55e00", "-"), EXACT: ("#56b4e9", "-"), EXACT_SMALL_INBOX: ("#56b4e9", ":"),
    RESIDUAL: ("#0072b2", "-"), NO_RESIDUAL: ("#cc79a7", "--"), "peers, 1-bit with residual": ("#009e73", "-"),
    "gossip, ring": ("#0072b2", "-"), "gossip, torus": ("#e69f00", "--"), "gossip, exponential": ("#d55e00", "-"),
    "gossip, random pairs": ("#009e73", "--"), "gossip, async pairs": ("#cc79a7", ":"),
}  # fmt: skip


def draw_sites(results: DecentralisedResults, path: Path) -> None:
    """Draw accuracy over virtual seconds: a panel per number of workers."""
    plt = pyplot()
    sizes = results.task("sites").workers
    chart, axes = plt.subplots(
        1, len(sizes), figsize=(3 + 4.6 * len(sizes), 4.8), sharey=True, layout="constrained", squeeze=False
    )
    for axis, workers in zip(axes[0], sizes, strict=True):
        for name, run in results.first_seed("sites", workers).items():
            _draw_run(axis, name, run, labelled=axis is axes[0, 0])
        axis.set(title=f"{workers} workers on four sites", xlabel="virtual seconds", xscale="log")
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.grid(alpha=0.2)
    axes[0, 0].set_ylabel("test accuracy (%)")
    chart.legend(frameon=False, fontsize=9, loc="outside right center")
    chart.savefig(path, dpi=110)
    plt.close(chart)


def _draw_run(axis: Any, name: str, run: DecentralisedRun, labelled: bool) -> None:
    colour, dashes = _LINES[name]
    seconds, accuracy = [point.seconds for point in run.points], [100 * point.accuracy for point in run.points]
    width = 2.2 if name == ALL_REDUCE else 1.5
    axis.plot(seconds, accuracy, color=colour, linestyle=dashes, linewidth=width, label=name if labelled else None)
    axis.plot(seconds[-1:], accuracy[-1:], color=colour, marker="o", markersize=5)


def draw_gossip(results: DecentralisedResults, path: Path) -> None:
    """Draw accuracy over virtual seconds for the first seed, and bytes over the number of workers."""
    plt = pyplot()
    chart, (learning, traffic) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    (workers,) = results.task("gossip").workers
    for name, run in results.first_seed("gossip", workers).items():
        _draw_run(learning, name, run, labelled=True)
    highest = 100 * max(run.accuracy for run in results.runs if run.task == "gossip")
    learning.set(title=f"{workers} workers", xlabel="virtual seconds", ylabel="test accuracy (%)")
    learning.set_ylim(highest - 12, highest + 1)
    labels = learning.get_legend_handles_labels()[1]
    for number, row in enumerate(results.traffic):
        colour, dashes = _LINES[row.method]
        label = None if row.method in labels else row.method
        megabytes = [count / 1e6 for count in row.bytes_per_step]
        size = 10 - number  # Where two lines coincide, both markers are visible.
        look = {"color": colour, "linestyle": dashes, "marker": "o", "markersize": size}
        traffic.plot(row.workers, megabytes, label=label, **look)
    numbers = results.traffic[0].workers
    traffic.set(title="bytes sent per step by one worker", xlabel="workers", ylabel="megabytes", xscale="log")
    traffic.set_yscale("log", base=2)
    traffic.set_xticks(numbers, [str(number) for number in numbers])
    traffic.minorticks_off()
    traffic.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    for axis in (learning, traffic):
        axis.grid(alpha=0.2)
    chart.legend(frameon=False, fontsize=9, loc="outside right center")
    chart.savefig(path, dpi=110)
    plt.close(chart)
