"""Figures of the report on staleness."""

from pathlib import Path

from reproductions.staleness.results import (
    ASYNC,
    ASYNC_AWARE,
    ASYNC_FULL_RATE,
    BSP,
    SOFT_SYNC,
    StalenessRun,
    StalenessTask,
)
from tutti.report.plots import pyplot

_LINES = {
    BSP: ("#000000", "-"), "SSP 1": ("#56b4e9", "-"), "SSP 3": ("#0072b2", "-"), "SSP 10": ("#003f6b", "--"),
    "SSP 3, eager": ("#0072b2", ":"), SOFT_SYNC: ("#009e73", "-"), ASYNC: ("#e69f00", "-"),
    ASYNC_FULL_RATE: ("#d55e00", ":"), ASYNC_AWARE: ("#cc79a7", "--"),
}  # fmt: skip
_TICKS = (0, 1, 2, 4, 8, 16, 32, 64, 128)


def draw_task(title: str, task: StalenessTask, runs: list[StalenessRun], path: Path) -> None:
    """Draw a column per cluster: accuracy over epochs, accuracy over virtual seconds, and staleness of updates."""
    plt = pyplot()
    columns = len(task.clusters)
    chart, axes = plt.subplots(
        3, columns, figsize=(2.6 + 3.7 * columns, 9), sharey="row", sharex=False, layout="constrained", squeeze=False
    )
    by_key = {(run.cluster, run.rule): run for run in runs}
    largest = max(max(run.staleness) for run in runs)
    for column, cluster in enumerate(task.clusters):
        over_epochs, over_seconds, stale = axes[:, column]
        for rule in task.rules:
            run = by_key[cluster, rule.name]
            colour, dashes = _LINES[rule.name]
            look = {"color": colour, "linestyle": dashes, "linewidth": 2.2 if rule.name == BSP else 1.4}
            accuracy = [100 * point.accuracy for point in run.points]
            label = rule.name if column == 0 else None
            over_epochs.plot([point.epochs for point in run.points], accuracy, label=label, **look)
            over_seconds.plot([point.seconds for point in run.points], accuracy, **look)
            total = sum(run.staleness.values())
            shares = [100 * count / total for count in run.staleness.values()]
            stale.plot(list(run.staleness), shares, marker="o", markersize=6 if rule.name == BSP else 2.5, **look)
        over_epochs.set(title=cluster, xlabel="epochs")
        over_seconds.set(xlabel="virtual seconds")
        over_seconds.set_xlim(left=0)
        stale.set(xlabel="staleness of an update (server steps)")
        stale.set_xscale("symlog", linthresh=1, linscale=0.4)
        stale.set_xlim(left=-0.2)
        ticks = [tick for tick in _TICKS if tick <= max(2, largest)]
        stale.set_xticks(ticks, [str(tick) for tick in ticks])
        stale.minorticks_off()
    for row, label in enumerate(("test accuracy (%)", "test accuracy (%)", "updates (%)")):
        axes[row, 0].set_ylabel(label)
    for axis in axes.flat:
        axis.grid(alpha=0.2)
    chart.suptitle(title)
    chart.legend(frameon=False, fontsize=9, loc="outside right center")
    chart.savefig(path, dpi=110)
    plt.close(chart)
