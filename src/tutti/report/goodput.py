"""The figure of goodput: the share of useful work under failures over the number of workers."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tutti.report.plots import pyplot


def plot_goodput(curves: Mapping[str, Sequence[tuple[int, float]]], title: str, path: Path) -> None:
    """Draw a line of (workers, share) per strategy."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.8), layout="constrained")
    for position, (name, points) in enumerate(curves.items()):
        workers, shares = zip(*points, strict=True)
        style = {"linestyle": ("-", "--", ":", "-.")[position // 10 % 4], "marker": "o", "markersize": 4}
        axes.plot(workers, [100 * share for share in shares], label=name, **style)
    numbers = sorted({number for points in curves.values() for number, _ in points})
    axes.set(xscale="log", xlabel="workers", ylabel="useful work (%)", ylim=(0, None), title=title)
    axes.set_xticks(numbers, [f"{number:,}" for number in numbers])
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.2)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)
