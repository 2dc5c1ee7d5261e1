"""`tutti simulate RECIPE`: a recipe in virtual time, with progress, pictures and a record of the run."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tutti.cli.board import board, loss_and_accuracy
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.recipe_task import (
    DataFolder,
    Epochs,
    JsonFile,
    LrScale,
    Options,
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
from tutti.cli.simulate.calibrate import calibrate
from tutti.cli.simulate.mean_loss import MeanLoss
from tutti.cli.simulate.place import ClusterText, JitterSpread, Slow, cluster_of
from tutti.cli.simulate.table import table, traffic
from tutti.cluster import Cluster, format_time
from tutti.errors import ConfigError
from tutti.recipes import RECIPES, Recipe
from tutti.recipes.training import TrainingConfig
from tutti.recipes.training import train as train_worker
from tutti.report.plots import pyplot
from tutti.report.simulation import plot_progress, plot_utilisation
from tutti.simulation.runs.simulate import Simulation, simulate
from tutti.strategies import parse


def run(
    recipe_name: Annotated[str | None, typer.Argument(metavar="RECIPE", help=f"One of {', '.join(RECIPES)}.")] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", "-n", help="Ranks to simulate.", show_default="16")
    ] = None,
    cluster_text: ClusterText = "ethernet-1g",
    strategy: StrategyText = "native",
    slow: Slow = None,
    jitter: JitterSpread = None,
    data: DataFolder = None,
    epochs: Epochs = None,
    option: Options = None,
    seed: Seed = 0,
    lr_scale: LrScale = 1.0,
    name: RunName = None,
    json_file: JsonFile = None,
    calibration: Annotated[
        Path | None,
        typer.Option("--calibrate", metavar="FILE", help="Measure this machine or a lab, write its cluster, and stop."),
    ] = None,
    lab: Annotated[
        str | None, typer.Option(metavar="SPEC", help="Where to --calibrate, such as hosts=4,rate=100mbit.")
    ] = None,
) -> None:
    """Train RECIPE on a simulated cluster: real gradients, virtual time, one process.

    The model learns what it would learn there; how long that would take is
    worked out from the cluster's links and speeds. The same command gives the
    same numbers every time. The run is recorded under runs/, with pictures.

    As in: tutti simulate digits --workers 64 --cluster ethernet-1g --slow 3=2.0
    """
    if calibration is not None:
        calibrate(recipe_name or "mnist-mlp", calibration, workers, lab)
        return
    if recipe_name is None or lab is not None:
        what = "a RECIPE, such as digits" if recipe_name is None else "--lab only with --calibrate"
        raise ConfigError(f"tutti simulate takes {what}; see tutti simulate --help.")
    workers = 16 if workers is None else workers
    asked = TrainingConfig(
        recipe=recipe_name,
        options=parse_options(option),
        strategy=strategy,
        data=str(data) if data else None,
        epochs=epochs,
        seed=seed,
        lr_scale=lr_scale,
    )
    cluster = cluster_of(cluster_text, slow, jitter)
    made, task = checked(asked, workers)
    cluster.place(workers)
    check_writable(json_file)
    folder = new_folder(name, f"simulated-{made.name}-{workers}x")
    console = Console()
    with kept(folder):
        summary = _recorded(task, made, workers, cluster, folder, console)
    write_json(json_file, summary)
    console.print(f"recorded in {folder}")
    judge(summary, made)


def _recorded(
    task: TrainingConfig, made: Recipe, workers: int, cluster: Cluster, folder: Path, console: Console
) -> dict[str, Any]:
    """The summary of the run, which leaves its record and pictures in `folder`."""
    (folder / "cluster.toml").write_text(cluster.to_toml())
    title = f"{task.recipe}, {workers} {'workers' if workers > 1 else 'worker'} on {cluster.name}, {task.strategy}"
    console.print(title)
    started_s = time.monotonic()
    simulation, reports = _run(task, workers, cluster, folder / "metrics.jsonl", console)
    wall_s = time.monotonic() - started_s
    summary = {
        **summarise(task, made, workers, outcome_of(simulation.results)),
        **{"cluster": cluster.name, "wall_s": round(wall_s, 3), **traffic(simulation)},
    }
    del summary["waiting_share"]  # Of rank 0, with its communicating: `ranks` tells the two apart, of each.
    console.print(table(summary))
    _draw(simulation, cluster, reports, summary, title, folder, console)
    # Last of all: a folder without it is of a run that did not come to its end.
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def _run(
    task: TrainingConfig, workers: int, cluster: Cluster, record: Path, console: Console
) -> tuple[Simulation, list[dict[str, Any]]]:
    with board(record, console, _numbers) as shown, MeanLoss(workers, shown.show) as mean:
        simulation = simulate(
            train_worker,
            task,
            workers=workers + (parse(task.strategy).num_dedicated_servers if workers > 1 else 0),
            cluster=cluster,
            watch=mean.show,
            on_progress=lambda now_s, messages: shown.note(now_s=now_s, messages=messages),
        )
        shown.note(now_s=simulation.seconds, messages=simulation.num_messages)
    return simulation, shown.reports


def _numbers(latest: dict[str, Any]) -> str:
    now_s = latest.get("now_s", latest["seconds"])
    messages = f", {latest['messages']:,} messages" if "messages" in latest else ""
    return f"{loss_and_accuracy(latest)}, {format_time(now_s)} simulated{messages}"


def _draw(
    simulation: Simulation,
    cluster: Cluster,
    reports: list[dict[str, Any]],
    summary: dict[str, Any],
    title: str,
    folder: Path,
    console: Console,
) -> None:
    try:
        pyplot()
    except ConfigError as error:
        console.print(f"no pictures: {error}", markup=False)
        return
    plot_progress(reports, summary["target"], title, folder / "progress.png")
    plot_utilisation(simulation, cluster, title, folder / "utilisation.png")
