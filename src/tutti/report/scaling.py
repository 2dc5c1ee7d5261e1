"""Figures of how training scales."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tutti.report.plots import pyplot

_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9")


def plot_scaling(results: Mapping[str, Sequence[Mapping[str, Any]]], title: str, path: Path) -> None:
    """Images a second and efficiency against workers, a line for each strategy."""
    plt = pyplot()
    figure, (speed, efficiency) = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    workers = sorted({row["workers"] for rows in results.values() for row in rows})
    first = next(iter(results.values()))[0]
    ideal = first["images_per_s"] / first["workers"] / first["efficiency"]
    speed.plot(workers, [ideal * number for number in workers], ":", color="#888888", label="nothing lost")
    for (name, rows), colour in zip(results.items(), _COLOURS * len(results), strict=False):
        numbers = [row["workers"] for row in rows]
        style = {"marker": "o", "markersize": 4, "color": colour, "label": name}
        speed.plot(numbers, [row["images_per_s"] for row in rows], **style)
        efficiency.plot(numbers, [100 * row["efficiency"] for row in rows], **style)
    for axes, words in ((speed, "images a second"), (efficiency, "efficiency, %")):
        axes.set(xscale="log", xlabel="workers", ylabel=words)
        axes.set_xticks(workers, [f"{number:,}" for number in workers])
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.2)
    speed.set(yscale="log")
    efficiency.set(ylim=(0, 103))
    speed.legend(frameon=False, fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    plt.close(figure)
