"""`tutti train`: a recipe on several workers, with progress and a record of the run."""

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tutti.cli.json_file import check_writable, write_json
from tutti.cli.options import (
    CheckpointEvery,
    DataFolder,
    Epochs,
    JsonFile,
    LearningRateText,
    RecipeOptions,
    RecipeText,
    Resume,
    RunName,
    Seed,
    StrategyText,
    checked_every,
    given_again,
    parse_lr,
    parse_recipe_options,
)
from tutti.cli.progress import (
    change_rows,
    describe_rate,
    format_bytes,
    format_loss,
    strategy_rows,
    training_progress,
)
from tutti.cli.run_folder import new_folder, note_folder_on_error
from tutti.errors import ConfigError, TuttiError

if TYPE_CHECKING:
    from tutti.recipes import Recipe
    from tutti.recipes.training import TrainingConfig, TrainingResult

CHECK_TOLERANCE = 1e-10
"""Largest relative difference between parameters of runs in float64 that counts as equal."""


Check = Annotated[
    bool,
    typer.Option("--check", metavar="", help="Also train with one worker, in float64, and compare the parameters."),
]


def train(
    context: typer.Context,
    recipe: RecipeText = "",
    workers: Annotated[
        int, typer.Option("--workers", "-n", help="Number of training workers. Dedicated servers are added on top.")
    ] = 2,
    strategy: StrategyText = "native",
    data: DataFolder = None,
    epochs: Epochs = None,
    option: RecipeOptions = None,
    seed: Seed = 0,
    lr: LearningRateText = None,
    name: RunName = None,
    checkpoint_every: CheckpointEvery = None,
    resume: Resume = None,
    check: Check = False,
    json_file: JsonFile = None,
) -> None:
    """Train a recipe on several workers of this machine, and record the run under runs/.

    All state is saved there every 5 minutes (--checkpoint-every), at the end, and when the run is stopped.

    Example: tutti train digits --workers 2 --strategy ring --check

    To train your own model, name a function that returns a tutti.recipes.Recipe: my_recipes:tiny for tiny() in
    my_recipes.py. The exit status is 3 if a run of all epochs ends below the recipe's target accuracy.
    """
    from tutti.launch.start import warm_up

    warm_up()  # Before the next imports, which take as long as those of the fork server beside them.
    from tutti.cli.resumed import resumed
    from tutti.cli.training_run import check_target, prepare, warn_of_rate
    from tutti.recipes.training import TrainingConfig

    requested = TrainingConfig(
        recipe=recipe,
        options=parse_recipe_options(option),
        strategy=strategy,
        data=str(data) if data else None,
        epochs=epochs,
        seed=seed,
        lr=parse_lr(lr),
        double=check,
        checkpoint_every=checked_every("5m" if checkpoint_every is None else checkpoint_every),
    )
    requested, workers = resumed(requested, workers, resume, context)
    made, config = prepare(requested, workers)
    if check:
        _refuse_lossy(strategy)
    check_writable(json_file)
    # Only now: a request that is refused leaves no folder behind.
    folder = resume or new_folder(name, f"{made.name}-{workers}x")
    config = replace(config, checkpoints=str(folder))
    console = Console()
    warn_of_rate(config, workers)
    with note_folder_on_error(folder):
        summary = _train_and_record(config, made, workers, folder, console)
    write_json(json_file, summary)
    console.print(f"recorded in {folder}")
    check_target(summary, made, partial(given_again, context))


def _train_and_record(
    config: "TrainingConfig", made: "Recipe", workers: int, folder: Path, console: Console
) -> dict[str, Any]:
    """Train, compare with one worker if the run is in float64 for that, and write the summary to the run's folder."""
    from tutti.cli.training_run import summarise

    result = _run(config, workers, folder / "metrics.jsonl", console)
    summary = summarise(config, made, workers, result)
    console.print(_table(summary))
    if config.double:
        summary["check"] = _compare_with_one_worker(config, workers, result, console)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def _refuse_lossy(strategy: str) -> None:
    """Raise for a compressed strategy. Staleness and local steps may be compared: the user asked for the difference."""
    from tutti.strategies import parse

    if parse(strategy).codec is not None:
        raise ConfigError(f"--check compares to the last digits, and '{strategy}' is lossy. Leave one of them out.")


def _run(config: "TrainingConfig", workers: int, record: Path, console: Console) -> "TrainingResult":
    """Train with a progress bar, and return the result of the rank that measured the accuracy."""
    from tutti.cli.training_run import num_ranks, result_with_accuracy
    from tutti.launch import launch
    from tutti.recipes.training import train as train_rank

    console.print(f"{config.recipe}, {workers} {'workers' if workers > 1 else 'worker'}, {config.strategy}")
    with training_progress(record, console, _format_numbers) as progress:
        results = launch(train_rank, config, workers=num_ranks(config, workers), watch=progress.report)
    return result_with_accuracy(results)


def _format_numbers(latest: dict[str, Any]) -> str:
    """The text beside the progress bar, from the newest report of rank 0."""
    return (
        f"{format_loss(latest)} {latest['samples_per_s']:.0f} samples/s "
        f"{format_bytes(latest['bytes_sent'])} sent {latest['waiting_share']:.0%} waiting"
        + (f" {latest['staleness']:.1f} stale" if "staleness" in latest else "")
    )


def _table(summary: dict[str, Any]) -> Table:
    """The table at the end of a run."""
    table = Table(show_header=False)
    samples_per_s = summary["samples"] / summary["seconds"]
    for label, value in (
        ("test accuracy", f"{summary['accuracy']:.2%} (target {summary['target']:.0%})"),
        ("learning rate", describe_rate(summary)),
        ("last loss of one worker", f"{summary['loss']:.4f}"),
        ("steps", f"{summary['steps']:,}"),
        ("time", f"{summary['seconds']:.1f} s"),
        ("samples/s", f"{samples_per_s:,.0f}"),
        ("bytes sent per worker", format_bytes(summary["bytes_sent"])),
        ("waiting for other workers", f"{summary['waiting_share']:.1%}"),
        *strategy_rows(summary["strategy_metrics"]),
        *change_rows(summary["changes"]),
    ):
        table.add_row(label, value)
    return table


def _compare_with_one_worker(
    config: "TrainingConfig", workers: int, result: "TrainingResult", console: Console
) -> dict[str, float]:
    """Train the same with one worker, and raise if the parameters differ by more than rounding."""
    # The record of this second run would overwrite that of the first.
    alone = _run(replace(config, strategy="native", checkpoints=None), 1, Path(os.devnull), console)
    # Relative to the largest parameter: a parameter near 0 would make a relative difference of its own meaningless.
    scale = alone.parameters.abs().max()
    difference = float((result.parameters - alone.parameters).abs().max() / scale)
    # Written so that NaN fails too.
    if not difference <= CHECK_TOLERANCE:
        raise TuttiError(
            f"{workers} workers did not match one: parameters differ by {difference:.1e} of the largest, "
            f"wanted {CHECK_TOLERANCE:.0e} or less."
        )
    who = "1 worker" if workers == 1 else f"{workers} workers"
    console.print(
        f"[bold green]{who} matched one[/]: after {result.steps} steps the parameters differ by "
        f"{difference:.1e} (float64, relative), test accuracy {result.accuracy:.2%} and {alone.accuracy:.2%}."
    )
    return {"difference": difference, "alone_accuracy": alone.accuracy, "alone_seconds": alone.seconds}
