"""Figures of collectives, and functions that all figures share. The file's suffix selects PNG or SVG.

Figures need matplotlib (`pip install 'tutti-train[report]'`), which is imported only when one is drawn.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tutti.cluster import format_size, format_time
from tutti.errors import ConfigError

FORMATS = (".png", ".svg")

COLOURS = {
    "ring": "#0072b2", "ring_blocking": "#56b4e9", "tree": "#009e73", "butterfly": "#e69f00",
    "recursive_doubling": "#d55e00", "hierarchical": "#cc79a7", "native": "#888888", "gloo": "#bbbbbb",
    "mpi": "#000000", "cheapest": "#f0e442",
}  # fmt: skip
"""One colour per algorithm in every figure, distinct to the colour-blind (Okabe & Ito 2008)."""


def check_plot(path: Path | None) -> None:
    """Refuse a figure that cannot be written or drawn, before anything is measured."""
    if path is None:
        return
    if path.suffix not in FORMATS:
        raise ConfigError(f"a plot's file ends in {' or '.join(FORMATS)}, got '{path}'.")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot: there is no folder {path.parent}.")
    pyplot()


def plot_collectives(result: Mapping[str, Any], title: str, path: Path) -> None:
    """Draw the time of an all-reduce against the message size: a line per algorithm, its prediction dotted."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    rows = result["rows"]
    sizes = [row["num_bytes"] for row in rows]
    for name in rows[0]["seconds"]:
        # "cheapest" is a broad band behind the algorithms that it chose.
        width, height = (5.0, 1) if name == "cheapest" else (1.6, 3)
        style = {"color": COLOURS[name], "linewidth": width, "zorder": height, "label": label(name)}
        axes.plot(sizes, [row["seconds"][name] for row in rows], marker="o", markersize=4, **style)
        if name in rows[0]["predicted"]:
            predicted = [row["predicted"][name] for row in rows]
            axes.plot(sizes, predicted, linestyle=":", linewidth=1.2, color=COLOURS[name], zorder=2)
    axes.plot([], [], linestyle=":", color="#444444", label="predicted")
    axes.set(xscale="log", yscale="log", xlabel="message size", ylabel="time per all-reduce", title=title)
    _name_ticks(axes, sizes)
    axes.legend(frameon=False, fontsize=8, ncols=2)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_lines(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], labels: tuple[str, str], title: str, path: Path
) -> None:
    """Draw a panel per key of `panels`, with a line of (bytes, seconds) per algorithm.

    Args:
        labels: of the x axis and of the y axis.
    """
    plt = pyplot()
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4.4 * len(panels), 4.2), sharey=True, layout="constrained", squeeze=False
    )
    for (name, lines), axis in zip(panels.items(), axes[0], strict=True):
        for algorithm, points in lines.items():
            xs, ys = zip(*points, strict=True)
            axis.plot(xs, ys, marker="o", markersize=4, color=COLOURS[algorithm], label=label(algorithm))
        axis.set(xscale="log", yscale="log", xlabel=labels[0], title=name)
        _name_ticks(axis, sorted({size for points in lines.values() for size, _ in points}))
    axes[0][0].set_ylabel(labels[1])
    axes[0][-1].legend(frameon=False, fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    # Else pyplot keeps the figure, and its memory, until the process ends.
    plt.close(figure)


def plot_spread(values: Mapping[str, Sequence[float]], unit: str, title: str, path: Path) -> None:
    """Draw a dot per run and a bar at the mean, for each algorithm."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7.5, 4), layout="constrained")
    for position, (name, runs) in enumerate(values.items()):
        axes.plot([position] * len(runs), runs, "o", color=COLOURS[name], alpha=0.8, zorder=3)
        axes.hlines(
            sum(runs) / len(runs), position - 0.25, position + 0.25, color=COLOURS[name], linewidth=3, alpha=0.5
        )
    axes.set_xticks(range(len(values)), [label(name) for name in values])
    axes.set(ylabel=unit, title=title)
    axes.grid(axis="y", alpha=0.2)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _name_ticks(axes: Any, sizes: Sequence[float]) -> None:
    """Label the x axis with the measured sizes in bytes, and the y axis with times."""
    axes.set_xticks(sizes, [format_size(size) for size in sizes], rotation=45)
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter(lambda seconds, _: format_time(seconds))
    axes.yaxis.set_minor_formatter(lambda seconds, _: "")
    axes.grid(alpha=0.2)


def label(name: str) -> str:
    """The name of an algorithm for tables and legends."""
    return {"mpi": "Open MPI", "gloo": "Gloo"}.get(name, name.replace("_", " "))


def pyplot() -> Any:
    """Import matplotlib.pyplot for drawing to files; raises `ConfigError` if it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'tutti-train[report]'.") from error
    matplotlib.use("Agg")  # Draws to files, without a display.
    import matplotlib.pyplot as plt

    return plt
