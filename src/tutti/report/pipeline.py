"""Figures of pipeline timelines: a row per rank, a box per microbatch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tutti.parallel.pipeline.timeline import ActionSpan, PipelineTimeline
from tutti.report.plots import pyplot

COLOURS = {"F": "#56b4e9", "B": "#e69f00", "I": "#e69f00", "W": "#009e73"}
"""Colour of each kind of work."""

MEANINGS = {"F": "forward", "B": "backward", "I": "backward: inputs", "W": "backward: weights"}


def plot_timelines(panels: Mapping[str, PipelineTimeline], title: str, path: Path) -> None:
    """Draw timelines below each other on one time axis: a row per rank, a box per microbatch."""
    plt = pyplot()
    num_rows = sum(timeline.num_ranks for timeline in panels.values())
    figure, axes = plt.subplots(
        len(panels),
        1,
        figsize=(10, 1.1 * len(panels) + 0.45 * num_rows + 0.6),
        sharex=True,
        layout="constrained",
        squeeze=False,
        height_ratios=[timeline.num_ranks for timeline in panels.values()],
    )
    longest = max(timeline.seconds for timeline in panels.values())
    for axis, (name, timeline) in zip(axes[:, 0], panels.items(), strict=True):
        _draw(axis, timeline, longest)
        axis.set_title(
            f"{name}: {1e3 * timeline.seconds:.1f} ms, {timeline.bubble:.0%} waiting", fontsize=9, loc="left"
        )
    kinds = sorted({span.kind for timeline in panels.values() for span in timeline.spans}, key="FBIW".index)
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[kind], label=MEANINGS[kind]) for kind in kinds]
    axes[-1, 0].set_xlabel("time (ms)")
    figure.legend(handles=handles, frameon=False, fontsize=8, ncols=len(handles), loc="outside lower right")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw(axis: Any, timeline: PipelineTimeline, longest_s: float) -> None:
    start = min(span.start_s for span in timeline.spans)
    for span in timeline.spans:
        _box(axis, span, start, longest_s)
    axis.set(xlim=(0, 1e3 * longest_s), ylim=(timeline.num_ranks - 0.5, -0.5), yticks=range(timeline.num_ranks))
    axis.set_yticklabels([f"rank {rank}" for rank in range(timeline.num_ranks)], fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _box(axis: Any, span: ActionSpan, start_s: float, longest_s: float) -> None:
    width = span.stop_s - span.start_s
    shade = 1.0 if span.stage == span.rank else 0.65  # A rank's later stages are paler.
    style = {"color": COLOURS[span.kind], "alpha": shade, "edgecolor": "white", "linewidth": 0.6}
    left = 1e3 * (span.start_s - start_s)
    axis.barh(span.rank, 1e3 * width, left=left, height=0.86, **style)
    if width > 0.012 * longest_s:  # Wide enough for a number.
        axis.text(left + 5e2 * width, span.rank, str(span.microbatch), ha="center", va="center", fontsize=7)
