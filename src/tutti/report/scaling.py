"""Figures of throughput and efficiency over the number of workers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tutti.report.plots import pyplot

Rows = Sequence[Mapping[str, Any]]
Panels = Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]

_STYLES = (
    ("#0072b2", "o"), ("#e69f00", "s"), ("#009e73", "^"), ("#d55e00", "D"), ("#cc79a7", "v"), ("#56b4e9", "P"),
)  # fmt: skip
"""Colour and marker of each strategy."""
_WIDTHS = (5.0, 1.2)
"""Widths of the first line, which is drawn below, and of the last: lines that coincide all stay visible."""
_FULL_SCALE = 50
"""The efficiency axis ends at 100 % if any efficiency is above this percentage."""


def plot_scaling(results: Mapping[str, Rows], title: str, path: Path) -> None:
    """Draw images per second and efficiency against workers, a line per strategy; bars if there is one number."""
    plt = pyplot()
    workers = sorted({row["workers"] for rows in results.values() for row in rows})
    figure, (speed, efficiency) = plt.subplots(1, 2, figsize=(10, 4.8), layout="constrained")
    (_bars if len(workers) == 1 else _lines)(speed, efficiency, results, workers)
    most = max(100 * row["efficiency"] for rows in results.values() for row in rows)
    speed.set(ylabel="images per second")
    efficiency.set(ylabel="efficiency (%)", ylim=(0, 103 if most > _FULL_SCALE else 1.25 * most))
    speed.yaxis.set_major_formatter(_plain)
    for axes in (speed, efficiency):
        axes.set_axisbelow(True)
        axes.grid(alpha=0.2)
    handles, labels = speed.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)), frameon=False, fontsize=9)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_panels(panels: Panels, ylabel: str, title: str, path: Path, scale: Literal["log", "linear"] = "log") -> None:
    """Draw a panel per key, with a line of (workers, value) per name.

    The dotted line extrapolates the first point of the first line linearly. `scale` applies to both axes.
    """
    plt = pyplot()
    size = (4.2 * len(panels) + 0.8, 4.4)
    figure, axes = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for (name, lines), axis in zip(panels.items(), axes[0], strict=True):
        _draw(axis, lines, scale)
        axis.set(title=name)
    axes[0][0].set_ylabel(ylabel)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)), frameon=False, fontsize=9)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw(axis: Any, lines: Mapping[str, Sequence[tuple[float, float]]], scale: Literal["log", "linear"]) -> None:
    workers = sorted({number for points in lines.values() for number, _ in points})
    first = next(iter(lines.values()))
    (fewest, start), (_, end) = first[0], first[-1]
    power = 1 if end > start else -1  # Throughput rises with the workers; a time falls.
    linear = [start * (number / fewest) ** power for number in workers]
    axis.plot(workers, linear, ":", color="#222222", zorder=3, label="linear scaling")
    for position, (label, points) in enumerate(lines.items()):
        colour, marker = _STYLES[position % len(_STYLES)]
        xs, ys = zip(*points, strict=True)
        width = _width(position, len(lines))
        axis.plot(xs, ys, color=colour, marker=marker, markersize=3 + width, linewidth=width, label=label)
    axis.set(xscale=scale, yscale=scale, xlabel="workers")
    if scale == "log":
        axis.set_xticks(workers, [f"{number:,}" for number in workers], fontsize=8)
        axis.set_xticks([], minor=True)
        _space_ticks(axis)
    axis.yaxis.set_major_formatter(_plain)
    axis.set_axisbelow(True)
    axis.grid(alpha=0.2)


def _lines(speed: Any, efficiency: Any, results: Mapping[str, Rows], workers: list[int]) -> None:
    """Draw speed and efficiency against the number of workers, a line per strategy."""
    ideal = [_ideal(results) * number for number in workers]
    speed.plot(workers, ideal, ":", color="#888888", label="linear scaling")
    for position, (name, unsorted) in enumerate(results.items()):
        rows = sorted(unsorted, key=lambda row: row["workers"])
        colour, marker = _STYLES[position % len(_STYLES)]
        width = _width(position, len(results))
        style = {"color": colour, "marker": marker, "markersize": 4 + width, "linewidth": width, "label": name}
        numbers = [row["workers"] for row in rows]
        speed.plot(numbers, [row["images_per_s"] for row in rows], **style)
        efficiency.plot(numbers, [100 * row["efficiency"] for row in rows], **style)
    for axes in (speed, efficiency):
        axes.set(xscale="log", xlabel="workers")
        axes.set_xticks(workers, [f"{number:,}" for number in workers])
        axes.set_xticks([], minor=True)
    speed.set(yscale="log")
    _space_ticks(speed)


def _width(position: int, count: int) -> float:
    """The width of line number `position` of `count` lines."""
    thick, thin = _WIDTHS
    return thick - (thick - thin) * position / (count - 1) if count > 1 else 2.0


def _bars(speed: Any, efficiency: Any, results: Mapping[str, Rows], workers: list[int]) -> None:
    """Draw speed and efficiency of one number of workers, a bar per strategy."""
    speed.axhline(_ideal(results) * workers[0], linestyle=":", color="#888888", label="linear scaling")
    for position, (name, (row, *_)) in enumerate(results.items()):
        colour, _ = _STYLES[position % len(_STYLES)]
        for axes, value in ((speed, row["images_per_s"]), (efficiency, 100 * row["efficiency"])):
            bar = axes.bar(position, value, color=colour, width=0.7, label=name)
            axes.bar_label(bar, [f"{value:,.0f}" if axes is speed else f"{value:.1f}"], padding=2)
    for axes in (speed, efficiency):
        axes.set(xlim=(-0.8, len(results) - 0.2), xlabel=f"{workers[0]:,} worker{'s' if workers[0] > 1 else ''}")
        axes.set_xticks([])


def _ideal(results: Mapping[str, Rows]) -> float:
    """Images per second of a single worker."""
    first = next(iter(results.values()))[0]
    # Efficiency is relative to a single worker, so any row gives that worker's speed.
    return float(first["images_per_s"] / first["workers"] / first["efficiency"])


def _space_ticks(axes: Any) -> None:
    """Put ticks at 1, 2 and 5 times each power of ten; evenly spaced where those would be few."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20) if high > 10 * low else MaxNLocator(6))
    axes.yaxis.set_minor_locator(NullLocator())


def _plain(value: float, _: int) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"
