"""The report on error feedback: tables and learning curves, from what was measured."""

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tutti.report.plots import pyplot

EXACT = "native"
"""The strategy without a codec that all others are compared with."""

_COLOURS = ("#0072b2", "#009e73", "#e69f00", "#cc79a7", "#d55e00", "#56b4e9")
_SMOOTH = 20
"""A loss is smoothed over one part in so many of its points."""


def write_report(result: dict[str, Any], folder: Path) -> str:
    """Draw the figures into `folder`; the report, in Markdown."""
    text = "\n".join([_head(result), _accuracy(result), _curves(result, folder)])
    (folder / "report.md").write_text(text)
    return text


def report_only(folder: Path) -> None:
    """Rewrite the report and its figures from the results stored in `folder`."""
    write_report(json.loads((folder / "results.json").read_text()), folder)


def _head(result: dict[str, Any]) -> str:
    plan = result["plan"]
    quick = (
        "\n**The quick form: it shows that all of it runs, and is too short to show more.**\n"
        if result["quick"]
        else ""
    )
    return f"""# Few bits, with and without error feedback

Seide et al. (*1-bit stochastic gradient descent*, Interspeech 2014) say every gradient in one bit, and Strom (*Scalable
distributed DNN training using commodity GPU cloud computing*, Interspeech 2015) only those beyond a threshold. Both
work because what is left out is added to the next gradient. Here with codecs of Tutti, with feedback and bare.

{plan["workers"]} workers, each codec at its default, everything else as the recipe has it.
Measured on {result["machine"]}. `tutti reproduce error-feedback` does it again.
{quick}"""


def _accuracy(result: dict[str, Any]) -> str:
    plan, rows = result["plan"], result["accuracy"]
    exact = [row["accuracy"] for row in rows if row["strategy"] == EXACT]
    exact_mean = statistics.mean(exact)
    exact_bytes = next(row["bytes_sent"] for row in rows if row["strategy"] == EXACT)
    lines = [
        f"## Test accuracy: {plan['accuracy_of']}, {plan['epochs']} epochs, seeds {_listed(plan['seeds'])}\n",
        f"Uncompressed: {_percent(exact)}, {exact_bytes / 1e3:.0f} KB a step and rank. In brackets the difference from "
        "that accuracy, in points; bare with one seed.\n",
        "| codec | KB a step and rank | with feedback | bare |",
        "| --- | ---: | ---: | ---: |",
    ]
    for codec in plan["codecs"]:
        both = [[row for row in rows if row["strategy"] == text] for text in _texts(codec)]
        cells = [_compared([row["accuracy"] for row in some], exact_mean) for some in both]
        sent = next((row["bytes_sent"] for row in both[0] if row["bytes_sent"] is not None), None)
        lines.append(f"| {codec} | {'–' if sent is None else f'{sent / 1e3:.0f}'} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _listed(seeds: list[int]) -> str:
    return ", ".join(map(str, seeds))


def _texts(codec: str) -> tuple[str, str]:
    return codec, bare(codec)


def bare(codec: str) -> str:
    """The text of a codec without feedback."""
    return f"{codec}{',' if ':' in codec else ':'}feedback=0"


def _compared(values: list[float | None], exact: float) -> str:
    reached = [value for value in values if value is not None]
    if len(reached) < len(values):
        return f"diverged in {len(values) - len(reached)} of {len(values)}"
    return f"{_percent(reached)} ({100 * (statistics.mean(reached) - exact):+.2f})"


def _percent(values: Iterable[float]) -> str:
    numbers = [100 * value for value in values]
    spread = f" ± {statistics.stdev(numbers):.2f}" if len(numbers) > 1 else ""
    return f"{statistics.mean(numbers):.2f}{spread} %"


def _curves(result: dict[str, Any], folder: Path) -> str:
    lines = ["## Learning curves\n"]
    for name in result["plan"]["curves_of"]:
        rows = [row for row in result["curves"] if row["recipe"] == name]
        _draw(name, rows, result["plan"]["drawn"], folder / f"{name}.png")
        lines += [f"![Loss and accuracy of {name} over epochs, with feedback and without]({name}.png)\n"]
        lines += [f"Test accuracy of {name} at the end:\n", "| codec | with feedback | bare |", "| --- | ---: | ---: |"]
        by_text = {row["strategy"]: row["accuracy"] for row in rows}
        lines.append(f"| uncompressed | {_one(by_text['native'])} | |")
        for codec in result["plan"]["drawn"]:
            lines.append(f"| {codec} | {' | '.join(_one(by_text[text]) for text in _texts(codec))} |")
        lines.append("")
    return "\n".join(lines)


def _one(accuracy: float | None) -> str:
    return "diverged" if accuracy is None else f"{accuracy:.2%}"


def _draw(name: str, rows: list[dict[str, Any]], codecs: list[str], path: Path) -> None:
    """Training loss on the left, test accuracy on the right; dashed without feedback."""
    plt = pyplot()
    figure, (loss, accuracy) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.15)
    by_text = {row["strategy"]: row for row in rows}
    drawn = [("uncompressed", "native", "#000000", "-")]
    for codec, colour in zip(codecs, _COLOURS, strict=False):
        for text, style, what in zip(_texts(codec), ("-", "--"), ("", ", bare"), strict=True):
            drawn.append((codec + what, text, colour, style))
    for label, text, colour, style in drawn:
        reports = by_text[text]["reports"]
        steps = [(it["epoch"], it["loss"]) for it in reports if "accuracy" not in it]
        tested = [(it["epoch"], 100 * it["accuracy"]) for it in reports if "accuracy" in it]
        shown = {"color": colour, "linestyle": style, "linewidth": 2.2 if text == "native" else 1.3}
        if steps:
            loss.plot(*_smoothed(steps), label=label, **shown)
        if tested:
            accuracy.plot(*zip(*tested, strict=True), marker="o", markersize=3, **shown)
    figure.suptitle(f"{name}: codecs with error feedback, and dashed without")
    loss.set(xlabel="epoch", ylabel="training loss, smoothed")
    finite = [it["loss"] for row in rows for it in row["reports"] if it["loss"] < float("inf")]
    loss.set_ylim(0, 1.15 * statistics.quantiles(finite, n=50)[-1])
    accuracy.set(xlabel="epoch", ylabel="test accuracy (%)")
    accuracy.xaxis.get_major_locator().set_params(integer=True)
    for axes in (loss, accuracy):
        axes.grid(alpha=0.2)
    figure.legend(frameon=False, fontsize=8, loc="outside right center")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _smoothed(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    width = max(1, len(points) // _SMOOTH)
    means = [statistics.mean(y for _, y in points[max(0, end - width) : end]) for end in range(1, len(points) + 1)]
    return [x for x, _ in points], means
