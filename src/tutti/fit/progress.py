"""Progress of `tutti.fit`: what the first rank reports, as a line on a terminal or as plain lines, and to a logger.

Reports are shown in the process in which `fit` was called, if it has started the workers; otherwise by the first rank.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tutti.fit.history import format_value

Logger = str | Path | Callable[[dict[str, Any], int], Any] | None
"""A file for one JSON object per line, or a function of (values by name, step)."""

_LINE_SECONDS = 15.0
"""Time between two plain lines within an epoch."""


class Reports:
    """Takes reports, shows them and passes them on to a logger."""

    def __init__(self, epochs: int, logger: Logger) -> None:
        self._epochs = epochs
        self._log = _to_file(Path(logger)) if isinstance(logger, str | Path) else logger
        self._progress: Progress | None = None
        self._task: Any = None
        self._last_s = time.monotonic()

    @contextmanager
    def shown(self) -> Iterator["Reports"]:
        """Show them while the context lasts."""
        console = Console()
        if not console.is_terminal or console.is_jupyter:
            yield self
            return
        bar = BarColumn(bar_width=10)
        with Progress(
            TextColumn("{task.description}"), bar, TimeRemainingColumn(compact=True), console=console, transient=True
        ) as self._progress:
            self._task = self._progress.add_task("starting", total=None)
            yield self

    def watch(self, rank: int, report: dict[str, Any]) -> None:
        """Take a report of a worker; a watcher of `tutti.launch`."""
        self.take(**report)

    def take(self, **report: Any) -> None:
        """Take a report of `ProgressReports`."""
        step = report["step"]
        if report["kind"] == "epoch":
            record = report["record"]
            self._print(f"epoch {report['number']}/{self._epochs}: {_as_text(record)}")
            values = {"epoch": report["number"], **record}
        else:
            text = f"step {step}: loss {report['loss']:.4f}"
            if "epoch" in report:  # The length of the data is known.
                number = min(int(report["epoch"]) + 1, self._epochs)
                text = f"epoch {number}/{self._epochs}, {text}, {report['samples_per_s']:,.0f} samples/s"
            self._show(text, step, report["total_steps"])
            values = {name: value for name, value in report.items() if name not in ("kind", "step", "total_steps")}
        if self._log is not None:
            self._log(values, step)

    def _print(self, line: str) -> None:
        self._last_s = time.monotonic()
        if self._progress is not None:
            self._progress.console.print(line, highlight=False, markup=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def _show(self, text: str, step: int, total_steps: int | None) -> None:
        if self._progress is not None:
            self._progress.update(self._task, description=text, completed=step, total=total_steps)
        elif time.monotonic() - self._last_s > _LINE_SECONDS:
            self._print(text)


def _as_text(record: dict[str, Any]) -> str:
    times = {"seconds": "{} s", "samples_per_s": "{} samples/s"}
    return ", ".join(
        times[name].format(format_value(name, value))
        if name in times
        else f"{name.replace('_', ' ')} {format_value(name, value)}"
        for name, value in record.items()
    )


def _to_file(path: Path) -> Callable[[dict[str, Any], int], None]:
    def log(values: dict[str, Any], step: int) -> None:
        # Opened for each line: a run that is killed leaves what it had reported, and nothing need be closed.
        with path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    return log
