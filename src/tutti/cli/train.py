"""`tutti train`: a recipe, with progress and a record of the run."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tutti.cli.board import board, in_bytes, loss_and_accuracy, strategy_rows
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.recipe_task import (
    DataFolder,
    Epochs,
    JsonFile,
    LrScale,
    Options,
    RecipeName,
    RunName,
    Seed,
    StrategyText,
    checked,
    judge,
    outcome_of,
    parse_options,
    summarise,
)
from tutti.cli.run_folder import kept, new_folder
from tutti.errors import ConfigError, TuttiError
from tutti.launch import launch
from tutti.plan.reason import has_codec
from tutti.recipes.training import TrainingConfig, TrainingResult
from tutti.recipes.training import train as train_worker
from tutti.strategies import parse

CHECK_TOLERANCE = 1e-10
"""Largest relative difference between parameters of runs in float64 that counts as a match."""


def train(
    recipe_name: RecipeName,
    workers: Annotated[int, typer.Option("--workers", "-n", help="Processes to start.")] = 2,
    strategy: StrategyText = "native",
    data: DataFolder = None,
    epochs: Epochs = None,
    option: Options = None,
    seed: Seed = 0,
    lr_scale: LrScale = 1.0,
    name: RunName = None,
    check: Annotated[
        bool, typer.Option("--check", help="Train with one worker too, and compare (in float64).")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Train RECIPE with several workers and record the run under runs/."""
    asked = TrainingConfig(
        recipe=recipe_name,
        options=parse_options(option),
        strategy=strategy,
        data=str(data) if data else None,
        epochs=epochs,
        seed=seed,
        lr_scale=lr_scale,
        double=check,
    )
    made, task = checked(asked, workers)
    if check and has_codec(parse(strategy)):
        raise ConfigError(f"--check compares to the last digits, and '{strategy}' is lossy. Leave one of them out.")
    check_writable(json_file)
    folder = new_folder(name, f"{made.name}-{workers}x")
    console = Console()
    with kept(folder):
        outcome = _run(task, workers, folder / "metrics.jsonl", console)
        summary = summarise(task, made, workers, outcome)
        console.print(_table(summary))
        if check:
            summary["check"] = _compare(task, workers, outcome, console)
        (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    write_json(json_file, summary)
    console.print(f"recorded in {folder}")
    judge(summary, made)


def _run(task: TrainingConfig, workers: int, record: Path, console: Console) -> TrainingResult:
    console.print(f"{task.recipe}, {workers} {'workers' if workers > 1 else 'worker'}, {task.strategy}")
    with board(record, console, _numbers) as shown:
        serving = parse(task.strategy).num_dedicated_servers if workers > 1 else 0
        results: list[TrainingResult | None] = launch(train_worker, task, workers=workers + serving, watch=shown.show)
    return outcome_of(results)


def _numbers(latest: dict[str, Any]) -> str:
    return (
        f"{loss_and_accuracy(latest)} {latest['samples_per_s']:.0f} samples/s "
        f"{in_bytes(latest['bytes_sent'])} sent {latest['waiting_share']:.0%} waiting"
        + (f" {latest['staleness']:.1f} stale" if "staleness" in latest else "")
    )


def _table(summary: dict[str, Any]) -> Table:
    table = Table(show_header=False)
    rate = summary["samples"] / summary["seconds"]
    for label, value in (
        ("test accuracy", f"{summary['accuracy']:.2%} (target {summary['target']:.0%})"),
        ("last loss, of one worker's part", f"{summary['loss']:.4f}"),
        ("steps", f"{summary['steps']:,}"),
        ("time", f"{summary['seconds']:.1f} s"),
        ("samples/s", f"{rate:,.0f}"),
        ("bytes sent per worker", in_bytes(summary["bytes_sent"])),
        ("waiting for other workers", f"{summary['waiting_share']:.1%}"),
        *strategy_rows(summary["strategy_metrics"]),
    ):
        table.add_row(label, value)
    return table


def _compare(task: TrainingConfig, workers: int, outcome: TrainingResult, console: Console) -> dict[str, float]:
    """Train the same with one worker and say how far apart the parameters ended."""
    alone = _run(replace(task, strategy="native"), 1, Path(os.devnull), console)
    scale = alone.parameters.abs().max()
    difference = float((outcome.parameters - alone.parameters).abs().max() / scale)
    if not difference <= CHECK_TOLERANCE:
        raise TuttiError(
            f"{workers} workers did not match one: parameters differ by {difference:.1e} of the largest, "
            f"wanted {CHECK_TOLERANCE:.0e} or less."
        )
    who = "1 worker" if workers == 1 else f"{workers} workers"
    console.print(
        f"[bold green]{who} matched one[/]: after {outcome.steps} steps the parameters differ by "
        f"{difference:.1e} (float64, relative), test accuracy {outcome.accuracy:.2%} and {alone.accuracy:.2%}."
    )
    return {"difference": difference, "alone_accuracy": alone.accuracy, "alone_seconds": alone.seconds}
