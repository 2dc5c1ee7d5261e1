"""`tutti train`: a recipe, with progress and a record of the run."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import IO, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tutti.cli.json_file import check_writable, write_json
from tutti.cli.run_folder import new_folder
from tutti.errors import ConfigError, TuttiError
from tutti.launch import launch
from tutti.recipes import RECIPES, recipe
from tutti.recipes.training import Outcome, Task
from tutti.recipes.training import train as train_worker
from tutti.strategies import parse

CHECK_TOLERANCE = 1e-10
"""Largest relative difference between parameters of runs in float64 that counts as a match."""


def train(
    recipe_name: Annotated[str, typer.Argument(metavar="RECIPE", help=f"One of {', '.join(RECIPES)}.")],
    workers: Annotated[int, typer.Option("--workers", "-n", help="Processes to start.")] = 2,
    strategy: Annotated[str, typer.Option(help="How replicas stay together.")] = "native",
    data: Annotated[Path | None, typer.Option(envvar="TUTTI_DATA", help="Folder with datasets.")] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over the data; the recipe's own by default.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="Of the recipe, such as second_hidden=800; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the initial parameters and the shuffle.")] = 0,
    name: Annotated[str | None, typer.Option(help="The run's folder under runs/.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Train with one worker too, and compare (in float64).")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the summary here.")] = None,
) -> None:
    """Train RECIPE with several workers and record the run under runs/."""
    options = _options(option or [])
    made = recipe(recipe_name, **options)
    task = Task(
        recipe=made.name,
        options=options,
        strategy=str(parse(strategy)),
        data=str(data) if data else None,
        epochs=epochs,
        seed=seed,
        double=check,
    )
    check_writable(json_file)
    if workers < 1:
        raise ConfigError(f"workers must be 1 or more, got {workers}.")
    made.data(data)  # A missing file is better said once, here, than by every worker.
    folder = new_folder(name, f"{made.name}-{workers}x")
    console = Console()
    outcome = _run(task, workers, folder / "metrics.jsonl", console)
    summary: dict[str, Any] = {
        **{"recipe": made.name, "options": options, "strategy": task.strategy, "workers": workers, "seed": seed},
        **{"epochs": epochs or made.epochs, "double": check, "torch": torch.__version__},
        **outcome.as_dict(),
    }
    console.print(_table(summary))
    if check:
        summary["check"] = _compare(task, workers, outcome, console)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    write_json(json_file, summary)
    console.print(f"recorded in {folder}")
    _judge(summary, complete=epochs is None or epochs >= made.epochs)


def _options(texts: list[str]) -> dict[str, Any]:
    pairs = [text.partition("=") for text in texts]
    try:
        return {key: json.loads(value) for key, _, value in pairs}
    except json.JSONDecodeError:
        raise ConfigError(f"--option takes NAME=NUMBER, got {', '.join(texts)}.") from None


def _run(task: Task, workers: int, record: Path, console: Console) -> Outcome:
    columns = (
        BarColumn(bar_width=10),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(compact=True),
    )
    console.print(f"{task.recipe}, {workers} {'workers' if workers > 1 else 'worker'}, {task.strategy}")
    with record.open("w") as lines, Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=1, numbers="starting")
        board = _Board(progress, bar, lines)
        results: list[Outcome] = launch(train_worker, task, workers=workers, watch=board.show)
        progress.update(bar, completed=results[0].steps, total=results[0].steps)
    return results[0]


class _Board:
    """Puts what rank 0 reports on the screen and into the record."""

    def __init__(self, progress: Progress, bar: Any, lines: IO[str]) -> None:
        self._progress, self._bar, self._lines = progress, bar, lines
        self._latest: dict[str, float] = {}

    def show(self, rank: int, values: dict[str, Any]) -> None:
        self._lines.write(json.dumps(values) + "\n")
        self._lines.flush()
        self._latest.update(values)
        latest = self._latest
        accuracy = f"acc {latest['accuracy']:.1%} " if "accuracy" in latest else ""
        numbers = (
            f"loss {latest['loss']:.3f} {accuracy}{latest['samples_per_s']:.0f} samples/s "
            f"{_bytes(latest['bytes_sent'])} sent {latest['waiting_share']:.0%} waiting"
        )
        self._progress.update(self._bar, completed=latest["step"], total=latest["total_steps"], numbers=numbers)


def _table(summary: dict[str, Any]) -> Table:
    table = Table(show_header=False)
    rate = summary["samples"] / summary["seconds"]
    for label, value in (
        ("test accuracy", f"{summary['accuracy']:.2%} (target {summary['target']:.0%})"),
        ("last loss, of rank 0's part", f"{summary['loss']:.4f}"),
        ("steps", f"{summary['steps']:,}"),
        ("time", f"{summary['seconds']:.1f} s"),
        ("samples/s", f"{rate:,.0f}"),
        ("bytes sent per worker", _bytes(summary["bytes_sent"])),
        ("waiting for other workers", f"{summary['waiting_share']:.1%}"),
    ):
        table.add_row(label, value)
    return table


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def _compare(task: Task, workers: int, outcome: Outcome, console: Console) -> dict[str, float]:
    """Train the same with one worker and say how far apart the parameters ended."""
    alone = _run(replace(task, strategy="native"), 1, Path(os.devnull), console)
    scale = alone.parameters.abs().max()
    difference = float((outcome.parameters - alone.parameters).abs().max() / scale)
    if not difference <= CHECK_TOLERANCE:
        raise TuttiError(
            f"{workers} workers did not match one: parameters differ by {difference:.1e} of the largest, "
            f"wanted {CHECK_TOLERANCE:.0e} or less."
        )
    console.print(
        f"[bold green]{workers} workers matched one[/]: after {outcome.steps} steps the parameters differ by "
        f"{difference:.1e} (float64, relative), test accuracy {outcome.accuracy:.2%} and {alone.accuracy:.2%}."
    )
    return {"difference": difference, "alone_accuracy": alone.accuracy, "alone_seconds": alone.seconds}


def _judge(summary: dict[str, Any], complete: bool) -> None:
    if complete and summary["accuracy"] < summary["target"]:
        raise TuttiError(
            f"test accuracy {summary['accuracy']:.2%} is below the target of {summary['target']:.0%} that "
            f"'{summary['recipe']}' reaches with its own settings."
        )
