"""The report on error feedback: claims, tables and learning curves, from the stored results."""

import statistics
from collections.abc import Iterable
from pathlib import Path

from reproductions.error_feedback.results import EXACT, CompressedTraining, ErrorFeedbackResults, strategies
from reproductions.records import load
from reproductions.report import PaperClaim, Report, Section, figure, plural, prose, table
from tutti.report.plots import pyplot

NO_LOSS_POINTS = 0.5
"""A smaller difference in test accuracy, in percentage points, counts as none."""
CLAIMED = {"onebit": "1-bit gradients (Seide)", "threshold": "Gradients beyond a threshold (Strom)"}
"""Codecs that the sources propose."""

_COLOURS = ("#0072b2", "#009e73", "#e69f00", "#cc79a7", "#d55e00", "#56b4e9")
_SMOOTHING = 20
"""A loss is averaged over one part in so many of its points."""


def report_only(folder: Path) -> None:
    """Rewrite the report and its figures from the results stored in `folder`."""
    write_report(load(ErrorFeedbackResults, folder / "results.json"), folder)


def write_report(results: ErrorFeedbackResults, folder: Path) -> str:
    """Write the figures and `report.md` into `folder`; return the report."""
    config = results.config
    return Report(
        name="error-feedback",
        title="Gradient compression with and without error feedback (Seide et al. 2014, Strom 2015)",
        source="Seide et al., *1-bit stochastic gradient descent*, Interspeech 2014; Strom, *Scalable distributed DNN "
        "training using commodity GPU cloud computing*, Interspeech 2015. The method is reproduced, on other models.",
        machine=results.machine,
        links=f"None: {plural(config.workers, 'worker')} on one host, over shared memory.",
        time="No times are reported. Bytes are counted.",
        quick=results.quick,
        introduction=[
            """Seide et al. compress every gradient element to one bit. Strom sends only the elements beyond a
            threshold. Both keep the compression error and add it to the next gradient (error feedback).""",
            f"""Here every codec of Tutti is trained with error feedback and without.
            {plural(config.workers, "worker")}; every codec has its default settings, everything else is the
            recipe's.""",
        ],
        criteria=f"""A difference in test accuracy of less than {NO_LOSS_POINTS:g} percentage points counts as none.
        This threshold was set after the results had been seen.""",
        claims=_claims(results),
        sections=[_accuracy_section(results), _curves_section(results, folder)],
        limits=[
            """The sources trained acoustic models on much more data. Runs without error feedback have one seed, and so
            have the learning curves."""
        ],
    ).write(folder)


def _claims(results: ErrorFeedbackResults) -> list[PaperClaim]:
    config, claims = results.config, []
    groups = {config.accuracy_recipe: (results.accuracy, config.codecs)}
    for name in config.curve_recipes:
        groups.setdefault(name, (tuple(run for run in results.curves if run.recipe == name), config.curve_codecs))
    for name, (runs, codecs) in groups.items():
        exact = _mean([run.accuracy for run in runs if run.strategy == EXACT])
        for codec, title in CLAIMED.items():
            if codec not in codecs:
                continue
            feedback, bare = (_mean([run.accuracy for run in runs if run.strategy == s]) for s in strategies(codec))
            claims += _codec_claims(f"{title}, {name}", exact, feedback, bare)
    return claims


def _codec_claims(title: str, exact: float | None, feedback: float | None, bare: float | None) -> list[PaperClaim]:
    """Return the claims that error feedback preserves the accuracy, and that it is needed."""
    assert exact is not None
    if feedback is None:
        return [PaperClaim(f"{title}: no loss with error feedback", "no or nearly no loss", "diverged", False)]
    lost = 100 * (feedback - exact)
    no_loss = lost > -NO_LOSS_POINTS
    reason = "" if no_loss else "another model and less data; the cause was not investigated"
    statement = f"{title}: no loss with error feedback"
    kept = PaperClaim(statement, "no or nearly no loss", f"{lost:+.2f} points", no_loss, reason)
    gained = None if bare is None else 100 * (feedback - bare)
    needed = PaperClaim(
        f"{title}: accuracy is lost without error feedback",
        "no number",
        "diverged without it" if gained is None else f"{-gained:+.2f} points without it",
        gained is None or gained > NO_LOSS_POINTS,
    )
    return [kept, needed]


def _mean(values: list[float | None]) -> float | None:
    """Return the mean, or None if a run diverged."""
    reached = [value for value in values if value is not None]
    return statistics.mean(reached) if reached and len(reached) == len(values) else None


def _accuracy_section(results: ErrorFeedbackResults) -> Section:
    config, runs = results.config, results.accuracy
    exact_runs = [run for run in runs if run.strategy == EXACT]
    exact = [run.accuracy for run in exact_runs if run.accuracy is not None]
    exact_bytes = exact_runs[0].bytes_per_step
    assert exact_bytes is not None
    rows = []
    for codec in config.codecs:
        by_strategy = [[run for run in runs if run.strategy == text] for text in strategies(codec)]
        cells = [_compared([run.accuracy for run in some], statistics.mean(exact)) for some in by_strategy]
        sent = next((run.bytes_per_step for run in by_strategy[0] if run.bytes_per_step is not None), None)
        rows.append([codec, "–" if sent is None else f"{sent / 1e3:.0f}", *cells])
    return Section(
        f"Test accuracy of {config.accuracy_recipe}",
        [
            prose(f"""{plural(config.epochs, "epoch")}, seeds {", ".join(map(str, config.seeds))}. Uncompressed:
            {_percent(exact)}, {exact_bytes / 1e3:.0f} KB sent per step and rank. In brackets the difference from that
            accuracy in points. Runs without error feedback have one seed."""),
            table(("codec", "KB sent per step and rank", "with error feedback", "without"), rows, num_text_columns=1),
        ],
    )


def _compared(values: list[float | None], exact: float) -> str:
    reached = [value for value in values if value is not None]
    if len(reached) < len(values):
        return f"diverged in {len(values) - len(reached)} of {len(values)}"
    return f"{_percent(reached)} ({100 * (statistics.mean(reached) - exact):+.2f})"


def _percent(values: Iterable[float]) -> str:
    numbers = [100 * value for value in values]
    deviation = f" ± {statistics.stdev(numbers):.2f}" if len(numbers) > 1 else ""
    return f"{statistics.mean(numbers):.2f}{deviation} %"


def _curves_section(results: ErrorFeedbackResults, folder: Path) -> Section:
    blocks = []
    for name in results.config.curve_recipes:
        runs = {run.strategy: run for run in results.curves if run.recipe == name}
        _draw_curves(name, runs, results.config.curve_codecs, folder / f"{name}.png")
        rows = [["uncompressed", _one(runs[EXACT].accuracy), ""]]
        rows += [
            [codec, *(_one(runs[text].accuracy) for text in strategies(codec))] for codec in results.config.curve_codecs
        ]
        blocks += [
            figure(
                f"Training loss and test accuracy of {name} over epochs, with and without error feedback", f"{name}.png"
            ),
            f"Final test accuracy of {name}, one seed:",
            table(("codec", "with error feedback", "without"), rows, num_text_columns=1),
        ]
    return Section("Learning curves", blocks)


def _one(accuracy: float | None) -> str:
    return "diverged" if accuracy is None else f"{accuracy:.2%}"


def _draw_curves(name: str, runs: dict[str, CompressedTraining], codecs: Iterable[str], path: Path) -> None:
    """Draw training loss on the left and test accuracy on the right; dashed without error feedback."""
    plt = pyplot()
    chart, (loss, accuracy) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    chart.get_layout_engine().set(w_pad=0.15)
    lines = [("uncompressed", EXACT, "#000000", "-")]
    for codec, colour in zip(codecs, _COLOURS, strict=False):
        for text, style, suffix in zip(strategies(codec), ("-", "--"), ("", ", no feedback"), strict=True):
            lines.append((codec + suffix, text, colour, style))
    for label, text, colour, style in lines:
        losses = [(point.epoch, point.loss) for point in runs[text].points if point.accuracy is None]
        tested = [(point.epoch, 100 * point.accuracy) for point in runs[text].points if point.accuracy is not None]
        look = {"color": colour, "linestyle": style, "linewidth": 2.2 if text == EXACT else 1.3}
        if losses:
            loss.plot(*_smoothed(losses), label=label, **look)
        if tested:
            accuracy.plot(*zip(*tested, strict=True), marker="o", markersize=3, **look)
    chart.suptitle(f"{name}: codecs with error feedback (solid) and without (dashed)")
    loss.set(xlabel="epoch", ylabel="training loss, smoothed")
    finite = [point.loss for run in runs.values() for point in run.points if point.loss < float("inf")]
    loss.set_ylim(0, 1.15 * statistics.quantiles(finite, n=50)[-1])
    accuracy.set(xlabel="epoch", ylabel="test accuracy (%)")
    accuracy.xaxis.get_major_locator().set_params(integer=True)
    for axes in (loss, accuracy):
        axes.grid(alpha=0.2)
    chart.legend(frameon=False, fontsize=8, loc="outside right center")
    chart.savefig(path, dpi=130)
    plt.close(chart)


def _smoothed(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    width = max(1, len(points) // _SMOOTHING)
    means = [statistics.mean(y for _, y in points[max(0, end - width) : end]) for end in range(1, len(points) + 1)]
    return [x for x, _ in points], means
