"""Figures of the report on Poseidon."""

from pathlib import Path

from reproductions.poseidon.claims import LATE_WORKERS, MODEL_NAMES
from reproductions.poseidon.results import LateWorkers, PoseidonResults
from tutti.report.plots import pyplot
from tutti.report.scaling import plot_panels

_PROTOCOLS = {
    "full": ("server and clients", "#0072b2"), "owners": ("factors to owners (Adam)", "#e69f00"),
    "broadcast": ("factors to all (SFB)", "#009e73"),
}  # fmt: skip
_LOOKS: dict[LateWorkers, tuple[str, str]] = {
    "even": ("#888888", "o"), "one slow": ("#d55e00", "s"), "pauses": ("#0072b2", "^"),
}  # fmt: skip


def draw_speed_ups(results: PoseidonResults, rate: str, path: Path) -> None:
    """Draw the speed-up over workers: a panel per model, a line per variant."""
    panels = {}
    for model in results.config.models:
        title = f"{MODEL_NAMES[model]}, {results.compute[model].batch_size} images per worker"
        panels[title] = {
            variant.name: [
                (number, row.speed_up) for number, row in results.by_workers(model, rate, variant.name).items()
            ]
            for variant in results.variants
        }
    plot_panels(panels, "speed-up over one worker", f"Links of {rate}", path)


def draw_staleness(results: PoseidonResults, path: Path) -> None:
    """Draw the time per step over the bound of staleness, relative to the compute time."""
    plt = pyplot()
    chart, axes = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
    compute_s, bounds = results.staleness[0].compute_s, results.config.bounds
    for cluster, (colour, marker) in _LOOKS.items():
        ratios = [seconds / compute_s for seconds in results.step_seconds(cluster).values()]
        axes.plot(range(len(ratios)), ratios, color=colour, marker=marker, label=LATE_WORKERS[cluster])
    axes.axhline(1, linestyle=":", color="#222222", label="compute time")
    axes.axhline(results.slowdown, linestyle="--", linewidth=1, color="#d55e00", label="slow worker's compute time")
    axes.set_xticks(range(len(bounds)), [str(bound) for bound in bounds])
    axes.set(xlabel="bound of staleness", ylabel="time per step / compute time", ylim=(0.9, None))
    axes.grid(alpha=0.2)
    axes.legend(frameon=False, fontsize=8)
    axes.set_title(f"AlexNet, {results.config.stale_workers} workers, links of {results.config.stale_rate}")
    chart.savefig(path, dpi=130)
    plt.close(chart)


def draw_traffic(results: PoseidonResults, path: Path) -> None:
    """Draw bars of the numbers that every protocol sends, layer by layer, by the published formulas."""
    plt = pyplot()
    models = list(dict.fromkeys(row.model for row in results.layers))
    chart, axes = plt.subplots(1, len(models), figsize=(5 * len(models), 4.2), sharey=True, layout="constrained")
    for model, axis in zip(models, axes, strict=True):
        rows = [row for row in results.layers if row.model == model]
        for offset, (protocol, (label, colour)) in enumerate(_PROTOCOLS.items()):
            heights = [row.published_floats[protocol] / 1e6 for row in rows]
            positions = [x + 0.27 * (offset - 1) for x in range(len(rows))]
            bars = axis.bar(positions, heights, 0.25, color=colour, label=label)
            axis.bar_label(bars, [f"{height:,.0f}" for height in heights], fontsize=7, padding=1)
        axis.set_xticks(range(len(rows)), [f"{row.layer}\n{row.num_out} × {row.num_in}" for row in rows])
        axis.set(title=model)
        axis.set_axisbelow(True)
        axis.grid(axis="y", alpha=0.2)
    axes[0].set_ylabel("million numbers per step, all workers")
    handles, labels = axes[0].get_legend_handles_labels()
    chart.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    first = results.layers[0]
    chart.suptitle(f"{first.workers} workers, {first.num_rows} samples each, published formulas")
    chart.savefig(path, dpi=130)
    plt.close(chart)
