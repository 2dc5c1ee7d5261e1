"""Figures of the report on Poseidon."""

from pathlib import Path
from typing import Any

from reproductions.poseidon.claims import NAMES, step_seconds
from tutti.report.plots import pyplot
from tutti.report.scaling import plot_panels

_PROTOCOLS = {"full": ("server and clients", "#0072b2"), "owners": ("factors to owners (Adam)", "#e69f00"),
              "broadcast": ("factors to all (SFB)", "#009e73")}  # fmt: skip
_LATE = {"even": ("all alike", "#888888", "o"), "one slow": ("one slow worker", "#d55e00", "s"),
         "pauses": ("pauses at random", "#0072b2", "^")}  # fmt: skip


def draw_speed_ups(result: dict[str, Any], rate: str, path: Path) -> None:
    """A panel for each model, in it a line for each way."""
    panels = {
        f"{NAMES[model]}, {int(result['computing'][model]['batch_size'])} images a worker": {
            way["name"]: [
                (row["workers"], row["speed_up"])
                for row in result["rows"]
                if (row["model"], row["rate"], row["way"]) == (model, rate, way["name"])
            ]
            for way in result["ways"]
        }
        for model in result["plan"]["models"]
    }
    plot_panels(panels, "speed-up over one worker", f"Links of {rate}", path)


def draw_staleness(result: dict[str, Any], path: Path) -> None:
    """Time a step against the bound, relative to what a worker computes."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
    computing_s = result["staleness"][0]["computing_s"]
    for late, (label, colour, marker) in _LATE.items():
        seconds = step_seconds(result, late)
        axes.plot(range(len(seconds)), [each / computing_s for each in seconds.values()], color=colour, marker=marker,
                  label=label)  # fmt: skip
    axes.axhline(1, linestyle=":", color="#222222", label="computing alone")
    axes.axhline(result["slow"], linestyle="--", linewidth=1, color="#d55e00", label="the slow worker's computing")
    axes.set_xticks(range(len(seconds)), [str(bound) for bound in seconds])
    axes.set(xlabel="bound of staleness", ylabel="time of a step, in steps of computing", ylim=(0.9, None))
    axes.grid(alpha=0.2)
    axes.legend(frameon=False, fontsize=8)
    axes.set_title(f"AlexNet, {result['plan']['stale_workers']} workers, links of {result['plan']['stale_rate']}")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_traffic(result: dict[str, Any], path: Path) -> None:
    """Bars of what each protocol puts on the wire, layer by layer, by the published formulas."""
    plt = pyplot()
    models = list(dict.fromkeys(row["model"] for row in result["layers"]))
    figure, axes = plt.subplots(1, len(models), figsize=(5 * len(models), 4.2), sharey=True, layout="constrained")
    for model, axis in zip(models, axes, strict=True):
        rows = [row for row in result["layers"] if row["model"] == model]
        for place, (protocol, (label, colour)) in enumerate(_PROTOCOLS.items()):
            heights = [row["published_floats"][protocol] / 1e6 for row in rows]
            bars = axis.bar(
                [x + 0.27 * (place - 1) for x in range(len(rows))], heights, 0.25, color=colour, label=label
            )
            axis.bar_label(bars, [f"{height:,.0f}" for height in heights], fontsize=7, padding=1)
        shapes = [f"{row['layer']['name']}\n{row['layer']['num_out']} × {row['layer']['num_in']}" for row in rows]
        axis.set_xticks(range(len(rows)), shapes)
        axis.set(title=model)
        axis.set_axisbelow(True)
        axis.grid(axis="y", alpha=0.2)
    axes[0].set_ylabel("million numbers in a step, all workers")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    first = result["layers"][0]
    figure.suptitle(f"{first['workers']} workers, {first['layer']['rows']} samples each, as published")
    figure.savefig(path, dpi=130)
    plt.close(figure)
