"""How a training run goes, on the screen and in its record."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tutti.cluster import format_time

Numbers = Callable[[dict[str, Any]], str]
"""From the newest reports to what is shown beside the bar."""


class Board:
    """Puts what rank 0 reports on the screen and into the record."""

    def __init__(self, progress: Progress, lines: IO[str], numbers: Numbers) -> None:
        self._progress, self._lines, self._numbers = progress, lines, numbers
        self._bar = progress.add_task("", total=1, numbers="starting")
        self._latest: dict[str, Any] = {}
        self.reports: list[dict[str, Any]] = []

    def show(self, rank: int, values: dict[str, Any]) -> None:
        """Take in a report."""
        self._lines.write(json.dumps(values) + "\n")
        self._lines.flush()
        self.reports.append(values)
        self.note(**values)

    def note(self, **values: Any) -> None:
        """Show values that are not for the record."""
        self._latest |= values
        if "step" in self._latest:
            done = {"completed": self._latest["step"], "total": self._latest["total_steps"]}
            self._progress.update(self._bar, numbers=self._numbers(self._latest), **done)


@contextmanager
def board(record: Path, console: Console, numbers: Numbers) -> Iterator[Board]:
    """A board for as long as the context lasts."""
    columns = (
        BarColumn(bar_width=10),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(compact=True),
    )
    with record.open("w") as lines, Progress(*columns, console=console) as progress:
        yield Board(progress, lines, numbers)


def loss_and_accuracy(latest: dict[str, Any]) -> str:
    """As far as they are known."""
    return f"loss {latest['loss']:.3f}" + (f" acc {latest['accuracy']:.1%}" if "accuracy" in latest else "")


def in_words(staleness: dict[int, int]) -> str:
    """How old updates were: the mean, and the most common ages."""
    total = sum(staleness.values())
    mean = sum(age * count for age, count in staleness.items()) / total
    most = sorted(staleness.items(), key=lambda item: -item[1])[:4]
    return f"{mean:.2f} steps; " + ", ".join(f"{age}: {count / total:.0%}" for age, count in sorted(most))


def in_bytes(number: float) -> str:
    """Bytes in words, by thousands."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def strategy_rows(metrics: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of a summary table for what a strategy reports of itself; values that say nothing are left out."""
    rows: list[tuple[str, str]] = []
    for name, value in metrics.items():
        if name == "planned":
            rows += _planned_rows(value)
        elif name == "staleness":
            rows += [("staleness of updates", in_words(value))] if value else []
        elif value is not None:
            rows.append((name.replace("_", " "), f"{value:.4f}" if isinstance(value, float) else str(value)))
    return rows


def _planned_rows(status: dict[str, Any]) -> list[tuple[str, str]]:
    """The strategy that the planner chose, and its predicted and measured step."""
    rows = [("chosen", status["chosen"])]
    if status["predicted_s"] is not None and status["step_s"] is not None:
        off = status["step_s"] / status["predicted_s"] - 1
        times = f"{format_time(status['predicted_s'])}, {format_time(status['step_s'])} ({off:+.0%})"
        rows.append(("a step, predicted and measured", times))
    return rows
