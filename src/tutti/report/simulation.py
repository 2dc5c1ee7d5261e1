"""Figures of a simulated run: its learning curve, and how its ranks spent their time."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tutti.cluster import Cluster, format_time
from tutti.events import Strip
from tutti.report.plots import pyplot
from tutti.simulation.runs.simulate import Simulation

USES = ("computing", "communicating", "waiting")
"""The states of a rank, in the order of a `Strip`'s kinds."""

COLOURS = ("#0072b2", "#e69f00", "#d4d4d4")
"""Colour of each state."""

_ENDED = "#ffffff"

_UNITS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_SMOOTH = 15
"""A curve is smoothed over a window of its length divided by this."""
_MOST_EPOCHS = 10
"""Most labels of epochs along an axis."""
_FEW_RANKS = 16
"""Up to so many ranks, every rank has a label and a row that shows shares."""
_PIXELS_OF_A_ROW = 64
"""Height of such a row in pixels."""


def plot_progress(reports: Sequence[Mapping[str, Any]], target: float, title: str, path: Path) -> None:
    """Draw the loss against virtual time and epochs, and the test accuracy if it was measured more than once.

    Args:
        reports: dicts with `seconds`, `epoch` and `loss`, and `accuracy` where the model was evaluated.
        target: the test accuracy to reach, from 0 to 1.
    """
    plt = pyplot()
    unit, size = _unit(max(report["seconds"] for report in reports))
    # Reports with an accuracy follow an evaluation; the others are of single steps.
    tested = [report for report in reports if "accuracy" in report]
    trained = [report for report in reports if "accuracy" not in report]
    num_panels = 2 if len(tested) > 1 else 1
    figure, (panels,) = plt.subplots(
        1, num_panels, figsize=(2.5 + 4 * num_panels, 4.4), squeeze=False, layout="constrained"
    )
    _draw_loss(panels[0], [report["seconds"] / size for report in trained], [report["loss"] for report in trained])
    if num_panels == 2:
        panels[1].axhline(100 * target, color="#888888", linestyle=":", linewidth=1.2, label=f"target, {target:.0%}")
        xs, ys = zip(*((report["seconds"] / size, 100 * report["accuracy"]) for report in tested), strict=True)
        panels[1].plot(xs, ys, "o-", markersize=4, color="#009e73", label="after each epoch")
        panels[1].margins(y=0.15)
        panels[1].set_ylabel("test accuracy (%)")
        panels[1].legend(frameon=False)
    # One point makes no curve: it goes into the title.
    elif tested:
        title += f"\ntest accuracy {tested[0]['accuracy']:.1%} after {tested[0]['epoch']:g} epoch (target {target:.0%})"
    for axis in panels:
        axis.set_xlim(left=0)
        axis.set_xlabel(f"virtual time ({unit})")
        axis.grid(alpha=0.2)
        if num_panels == 2:
            _count_epochs(axis, tested, size)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_utilisation(simulation: Simulation, cluster: Cluster, title: str, path: Path) -> None:
    """Draw a row per rank: its states over virtual time, and their totals.

    With few ranks a row shows the shares of all states; with many, the most frequent state.
    """
    plt = pyplot()
    ranks = simulation.ranks
    height = min(9.0, max(2.8, 1.8 + 0.28 * len(ranks)))
    figure, (strips, totals) = plt.subplots(
        1, 2, figsize=(11, height), sharey=True, width_ratios=(4, 1), layout="constrained"
    )
    unit, size = _unit(simulation.seconds)
    # One picture of all ranks, since thousands of bars would take minutes to draw.
    picture, stop_s = _picture([rank.strip for rank in ranks], simulation.seconds)
    extent = (0, stop_s / size, len(ranks) - 0.5, -0.5)
    strips.imshow(picture, aspect="auto", interpolation="nearest", extent=extent)
    strips.set(xlim=(0, simulation.seconds / size), xlabel=f"virtual time ({unit})", ylabel="rank")
    shown = "shares of its time" if len(ranks) <= _FEW_RANKS else "its most frequent state"
    bin_s = float(f"{stop_s / picture.shape[1]:.2g}")
    strips.set_title(f"One row per rank: {shown}, in bins of {format_time(bin_s)}", fontsize=9)
    # Beside each row, the totals of the same states.
    left = np.zeros(len(ranks))
    for use, colour, spent in zip(USES, COLOURS, _spent(simulation), strict=True):
        width = 100 * spent / simulation.seconds
        totals.barh(range(len(ranks)), width, left=left, height=1.0, color=colour, label=use, linewidth=0)
        left += width
    totals.set(xlim=(0, 100), xlabel="share of time (%)")
    # Labels for as many ranks as there is room for.
    names = rank_names(cluster, len(ranks))
    strips.set_yticks(list(names), list(names.values()))
    if len(ranks) <= _FEW_RANKS:
        for axis in (strips, totals):
            axis.hlines(np.arange(len(ranks) - 1) + 0.5, 0, axis.get_xlim()[1], color="white", linewidth=2)
    figure.legend(*totals.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_loss(axis: Any, xs: list[float], losses: list[float]) -> None:
    """Draw every report, and their running mean if there are enough. Single reports may exceed the axis."""
    mean = _running_mean(np.array(losses))
    smooth = len(losses) // _SMOOTH >= 2
    style = {"color": "#56b4e9", "linewidth": 0.8} if smooth else {"color": "#0072b2", "marker": "o", "markersize": 4}
    axis.plot(xs, losses, label="per step", **style)
    if smooth:
        axis.plot(xs, mean, color="#0072b2", linewidth=2, label="running mean")
        axis.legend(frameon=False)
    # By the mean, so that one step with a huge loss does not press the curve flat. `or 1.0` for losses that are all
    # 0.
    axis.set_ylim(0, 1.15 * mean.max() or 1.0)
    axis.set_ylabel("training loss" if smooth else "training loss per step")


def _count_epochs(axis: Any, tested: Sequence[Mapping[str, Any]], size: float) -> None:
    """Mark the ends of epochs along the top axis."""
    every = 1 + (len(tested) - 1) // _MOST_EPOCHS
    shown = tested[every - 1 :: every]
    top = axis.secondary_xaxis("top")
    top.set_xticks([report["seconds"] / size for report in shown], [f"{report['epoch']:g}" for report in shown])
    top.set_xlabel("epochs")


def _running_mean(values: np.ndarray) -> np.ndarray:
    """The mean over a window around each value; the window is narrower at the start, and cut off at the end."""
    half = len(values) // _SMOOTH // 2
    sums = np.concatenate([[0.0], np.cumsum(values)])  # A window's sum is the difference of two of these.
    indices = np.arange(len(values))
    reach = np.minimum(half, indices)
    stops = np.minimum(indices + reach + 1, len(values))
    return (sums[stops] - sums[indices - reach]) / (stops - indices + reach)


def rank_names(cluster: Cluster, workers: int) -> dict[int, str]:
    """Labels of as many ranks as there is room for: rank, host if hosts differ, and slowdown."""
    hosts = cluster.place(workers)
    show_hosts = isinstance(cluster.hosts, tuple) or len({host.name for host in hosts}) < workers
    speeds = [cluster.speed_of(rank, host) for rank, host in enumerate(hosts)]
    median_speed = statistics.median_high(speeds)
    slow = [rank for rank, speed in enumerate(speeds) if speed < median_speed][:_FEW_RANKS]
    every = -(-workers // _FEW_RANKS)
    # Slow ranks are always named; regular labels next to them would overlap.
    near = {rank + offset for rank in slow for offset in range(1 - every, every)}
    names = {}
    for rank in sorted({*slow, *(rank for rank in range(0, workers, every) if rank not in near)}):
        names[rank] = f"{rank}, {hosts[rank].name}" if show_hosts else f"{rank}"
        names[rank] += f", {median_speed / speeds[rank]:.3g}× slower" if rank in slow else ""
    return names


def _spent(simulation: Simulation) -> np.ndarray:
    """Seconds by state and rank, of shape (state, rank)."""
    return np.array([[rank.busy_s, rank.communicating_s, rank.waiting_s] for rank in simulation.ranks]).T


def _picture(strips: Sequence[Strip], seconds: float) -> tuple[np.ndarray, float]:
    """Pixels of shape (rows, bin, colour), and the time at which the last bin ends. White: the rank has ended."""
    # Ranks that ended early have narrower bins; all widths are powers of two times the first.
    bin_s = max(strip.bin_s for strip in strips)
    num_bins = int(np.ceil(seconds / bin_s)) or 1
    # (rank, state, bin): the share of each state in each bin.
    shares = np.stack([_widened(strip, bin_s)[:, :num_bins] for strip in strips]) / bin_s
    shares[:, :, -1] *= bin_s / (seconds - (num_bins - 1) * bin_s)  # The last bin is shorter than the others.
    # A fourth state for the remainder: the rank has ended.
    shares = np.concatenate([shares, 1 - shares.sum(1, keepdims=True)], 1)
    if len(strips) > _FEW_RANKS:
        # (rank, bin): too many ranks for more than one pixel row each.
        use = shares.argmax(1)
    else:
        heights = 1 - (np.arange(_PIXELS_OF_A_ROW) + 0.5) / _PIXELS_OF_A_ROW
        # (rank, state, pixel, bin): whether a pixel lies above the top of a state. Their number is the pixel's state.
        above = heights[:, None] > np.cumsum(shares, 1)[:, :-1, None, :]
        use = above.sum(1)
    colours = np.array([[int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in (*COLOURS, _ENDED)], np.uint8)
    return colours[use].reshape(-1, num_bins, 3), bin_s * num_bins


def _widened(strip: Strip, bin_s: float) -> np.ndarray:
    """A strip's seconds (kind, bin) in wider bins."""
    times = round(bin_s / strip.bin_s)
    kinds, num_bins = strip.seconds.shape
    padded = np.zeros((kinds, -(-num_bins // times) * times))
    padded[:, :num_bins] = strip.seconds
    wide = np.zeros((kinds, num_bins))
    wide[:, : padded.shape[1] // times] = padded.reshape(kinds, -1, times).sum(2)
    return wide


def _unit(seconds: float) -> tuple[str, float]:
    """The largest unit of which `seconds` are two or more, and its length in seconds."""
    fitting = [(name, size) for name, size in _UNITS.items() if seconds >= 2 * size]
    return fitting[-1] if fitting else ("µs", _UNITS["µs"])
