"""The progress of a training run: a bar on the screen and a record in a file."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tutti.cluster import format_time

FormatNumbers = Callable[[dict[str, Any]], str]
"""Formats the newest values of all reports, for the text beside the progress bar."""


class TrainingProgress:
    """Shows the reports of rank 0 beside a progress bar and writes them to a file, one JSON object per line."""

    def __init__(self, progress: Progress, record: IO[str], format_numbers: FormatNumbers) -> None:
        self._progress, self._record, self._format_numbers = progress, record, format_numbers
        self._bar = progress.add_task("", total=1, numbers="starting")
        self._latest: dict[str, Any] = {}
        self.reports: list[dict[str, Any]] = []

    def report(self, rank: int, values: dict[str, Any]) -> None:
        """Record and show a report; a watcher of `tutti.launch`."""
        self._record.write(json.dumps(values) + "\n")
        # Each report at once: a run that is killed leaves what it had reported.
        self._record.flush()
        self.reports.append(values)
        self.show(**values)

    def show(self, **values: Any) -> None:
        """Show values without recording them."""
        self._latest |= values
        # `tutti simulate` shows its clock and its messages before the first report.
        if "step" in self._latest:
            done = {"completed": self._latest["step"], "total": self._latest["total_steps"]}
            self._progress.update(self._bar, numbers=self._format_numbers(self._latest), **done)


@contextmanager
def training_progress(record: Path, console: Console, format_numbers: FormatNumbers) -> Iterator[TrainingProgress]:
    """Show a progress bar and append reports to the file `record`, for as long as the context lasts."""
    columns = (
        BarColumn(bar_width=10),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(compact=True),
    )
    with record.open("a") as lines, Progress(*columns, console=console) as progress:
        yield TrainingProgress(progress, lines, format_numbers)


def describe_rate(summary: dict[str, Any]) -> str:
    """The learning rate of a run's last step; with the momentum and its start where a rule may have changed those."""
    if summary["lr_option"] != "auto":
        return f"{summary['lr']:.3g}"
    start = summary["synchronous_steps"]
    after = f", after {start:,} synchronous steps at the recipe's rate" if start else ""
    return f"{format_rate(summary['lr'], summary['momentum'])} (auto{after})"


def format_rate(lr: float, momentum: float | None) -> str:
    """A learning rate, and the momentum if there is one."""
    return f"{lr:.3g}" + (f", momentum {momentum:.3g}" if momentum else "")


def format_loss(latest: dict[str, Any]) -> str:
    """The loss, and the accuracy once it was measured."""
    return f"loss {latest['loss']:.3f}" + (f" acc {latest['accuracy']:.1%}" if "accuracy" in latest else "")


def format_staleness(counts: dict[int, int]) -> str:
    """The mean age of updates in steps, and the shares of the four most common ages."""
    total = sum(counts.values())
    mean = sum(age * count for age, count in counts.items()) / total
    most = sorted(counts.items(), key=lambda item: -item[1])[:4]
    return f"{mean:.2f} steps; " + ", ".join(f"{age}: {count / total:.0%}" for age, count in sorted(most))


def format_bytes(number: float) -> str:
    """Bytes in decimal units, such as 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def strategy_rows(metrics: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of a summary table for the metrics of a strategy; empty metrics are left out."""
    rows: list[tuple[str, str]] = []
    for name, value in metrics.items():
        if name == "planned":
            rows += _planned_rows(value)
        elif name == "staleness":
            rows += [("staleness of updates", format_staleness(value))] if value else []
        elif value is not None:
            rows.append((name.replace("_", " "), f"{value:.4f}" if isinstance(value, float) else str(value)))
    return rows


def change_rows(changes: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of a summary table for changes of the workers; none if there were none, and no counts of 0."""
    if not changes["generations"]:
        return []
    counts = [(name.replace("_", " "), f"{changes[name]:,}") for name in changes if name != "seconds" and changes[name]]
    return [*counts, ("time in changes of the workers", format_time(changes["seconds"]))]


def _planned_rows(status: dict[str, Any]) -> list[tuple[str, str]]:
    """The strategy that the planner chose, and its predicted and measured step."""
    rows = [("chosen strategy", status["chosen"])]
    if status["predicted_s"] is not None and status["step_s"] is not None:
        error = status["step_s"] / status["predicted_s"] - 1
        times = f"{format_time(status['predicted_s'])}, {format_time(status['step_s'])} ({error:+.0%})"
        rows.append(("predicted and measured step", times))
    return rows
