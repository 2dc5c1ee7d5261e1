"""The work of `tutti simulate RECIPE`: train in virtual time, print a summary, and record the run with figures.

This module imports torch; the command imports it when it runs.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from tutti.cli.progress import format_loss, training_progress
from tutti.cli.run_folder import new_folder, note_folder_on_error
from tutti.cli.simulate.mean_loss import MeanLoss
from tutti.cli.simulate.summary import summary_table, traffic
from tutti.cli.training_run import check_target, num_ranks, prepare, result_with_accuracy, summarise, warn_of_rate
from tutti.cluster import Cluster, format_time
from tutti.errors import ConfigError
from tutti.launch.elastic_run import ElasticRun
from tutti.recipes import Recipe
from tutti.recipes.training import TrainingConfig
from tutti.recipes.training import train as train_rank
from tutti.report.plots import pyplot
from tutti.report.simulation import plot_progress, plot_utilisation
from tutti.simulation.runs.simulate import Simulation, check_chaos, simulate

Summary = dict[str, Any]


def simulate_training(
    requested: TrainingConfig,
    workers: int | ElasticRun,
    cluster: Cluster,
    name: str | None,
    again: Callable[..., str],
    write: Callable[[Summary], None] = lambda summary: None,
) -> None:
    """Simulate a training run, record it under runs/, and raise if it misses the recipe's target accuracy.

    Args:
        workers: how many, or how they may come and go.
        name: of the run's folder; by default made from the recipe, the workers and the time.
        again: returns the command line of the run, with the given words after it.
        write: called with the summary before the accuracy is checked.
    """
    number, most = (workers, workers) if isinstance(workers, int) else (workers.num_started, workers.maximum)
    made, config = prepare(requested, number)
    # Before the folder is made: a refused run leaves none.
    hosts = cluster.place(most)  # Refuses more ranks than the hosts have room for.
    if isinstance(workers, ElasticRun) and workers.chaos is not None:
        check_chaos(workers, hosts)
    folder = new_folder(name, f"simulated-{made.name}-{number}x")
    console = Console()
    warn_of_rate(config, number)
    with note_folder_on_error(folder):
        summary = _record(config, made, workers, cluster, folder, console)
    write(summary)
    console.print(f"recorded in {folder}")
    check_target(summary, made, again)


def _record(
    config: TrainingConfig,
    made: Recipe,
    workers: int | ElasticRun,
    cluster: Cluster,
    folder: Path,
    console: Console,
) -> Summary:
    """Simulate the run and leave its record and figures in `folder`; returns the summary."""
    (folder / "cluster.toml").write_text(cluster.to_toml())
    number = workers if isinstance(workers, int) else workers.num_started
    count = f"{number} {'workers' if number > 1 else 'worker'}"
    if isinstance(workers, ElasticRun):
        count = f"{workers.minimum} to {workers.maximum} workers"
    title = f"{config.recipe}, {count} on {cluster.name}, {config.strategy}"
    console.print(title)
    started_s = time.monotonic()
    simulation, reports = _simulate(config, workers, cluster, folder / "metrics.jsonl", console)
    wall_s = time.monotonic() - started_s
    summary = {
        **summarise(config, made, number, result_with_accuracy(simulation.results)),
        **{"cluster": cluster.name, "wall_s": round(wall_s, 3), **traffic(simulation)},
    }
    # It is rank 0's share of waiting and communicating together; "ranks" has both, for every rank.
    del summary["waiting_share"]
    for at_s, text in simulation.chaos:
        console.print(f"{format_time(at_s)}: {text}", markup=False, highlight=False)
    console.print(summary_table(summary))
    _draw(simulation, cluster, reports, summary, title, folder, console)
    # Written last: a folder without a summary belongs to a run that did not end.
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def _simulate(
    config: TrainingConfig, workers: int | ElasticRun, cluster: Cluster, record: Path, console: Console
) -> tuple[Simulation, list[dict[str, Any]]]:
    with (
        training_progress(record, console, _format_numbers) as progress,
        MeanLoss(workers if isinstance(workers, int) else workers.num_started, progress.report) as mean_loss,
    ):
        simulation = simulate(
            train_rank,
            config,
            workers=num_ranks(config, workers) if isinstance(workers, int) else workers,
            cluster=cluster,
            watch=mean_loss.report,
            on_progress=lambda now_s, messages: progress.show(now_s=now_s, messages=messages),
        )
        progress.show(now_s=simulation.seconds, messages=simulation.num_messages)
    return simulation, progress.reports


def _format_numbers(latest: dict[str, Any]) -> str:
    """The text beside the progress bar: loss, virtual time and messages so far."""
    now_s = latest.get("now_s", latest["seconds"])
    messages = f", {latest['messages']:,} messages" if "messages" in latest else ""
    return f"{format_loss(latest)}, {format_time(now_s)} simulated{messages}"


def _draw(
    simulation: Simulation,
    cluster: Cluster,
    reports: list[dict[str, Any]],
    summary: Summary,
    title: str,
    folder: Path,
    console: Console,
) -> None:
    """Draw the figures, if matplotlib is installed."""
    try:
        pyplot()
    except ConfigError as error:
        console.print(f"no figures: {error}", markup=False)
        return
    plot_progress(reports, summary["target"], title, folder / "progress.png")
    plot_utilisation(simulation, cluster, title, folder / "utilisation.png")
