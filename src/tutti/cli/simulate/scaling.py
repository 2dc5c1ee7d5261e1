"""`tutti simulate scaling`: how a large model would train on many workers, by sizes alone."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tutti.cli.json_file import check_writable, write_json
from tutti.cli.place import numbers_of_workers
from tutti.cli.simulate.place import ClusterText
from tutti.cli.strategies import split_strategies
from tutti.cluster import Cluster, Compute, format_size, format_time, parse_time
from tutti.errors import ConfigError, UnknownName
from tutti.recipes.models import LARGE
from tutti.recipes.speeds import IMAGES_PER_S, seconds_per_sample
from tutti.report.plots import check_plot, label
from tutti.report.scaling import plot_scaling
from tutti.simulation.runs.scaling import ScalingCase, ScalingResult
from tutti.simulation.runs.scaling import scaling as simulate_scaling
from tutti.strategies import AllReduce, Strategy, parse

STRATEGY = "ring:bucket_bytes=67108864"
"""Buckets of 64 MiB: with many ranks each is cut into as many messages."""


def scaling(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(LARGE)}.")] = "resnet50",
    workers: Annotated[str, typer.Option("--workers", "-n", help="Numbers of workers, such as 8,64,512.")] = "8,64,512",
    cluster_text: ClusterText = "ethernet-10g",
    strategy: Annotated[str, typer.Option(help="How replicas stay together; commas between several.")] = STRATEGY,
    batch: Annotated[int, typer.Option(min=1, help="Images of each worker in a step.")] = 64,
    accelerator: Annotated[
        str | None, typer.Option(help=f"As fast as published: {', '.join(IMAGES_PER_S)}.", show_default="p100")
    ] = None,
    sample: Annotated[
        str | None, typer.Option(help="Time of an image, such as 4.5ms; 'cluster' is as its file says.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="To simulate.")] = 3,
    plot: Annotated[Path | None, typer.Option(help="Draw it here: a file that ends in .png or .svg.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")] = None,
) -> None:
    """Simulate training of a large model without its values: images a second, and what is lost to the network.

    Time grows with the number of messages: of a ring, 2 × workers² for each bucket and step.
    """
    check_writable(json_file)
    check_plot(plot)
    if model not in LARGE:
        raise UnknownName("model", model, LARGE)
    place = _paced(Cluster.load(cluster_text), model, accelerator, sample)
    numbers = numbers_of_workers(workers, 1, "8,64,512")
    for number in numbers:
        place.place(number)  # Better said now than after the others.
    strategies = {text: parse(text) for text in split_strategies(strategy)}
    console = Console()
    console.print(f"{model}, {batch} images a worker, {place.name}: {place.compute}")
    results: dict[str, list[dict[str, Any]]] = {}
    for text, each in strategies.items():
        case = ScalingCase(model=model, cluster=place, strategy=each, batch_size=batch, steps=steps)
        rows = _simulated(case, numbers, console)
        console.print(_table(_in_words(each), rows))
        results[text] = [row.as_dict() for row in rows]
    write_json(json_file, {"model": model, "cluster": place.to_toml(), "batch_size": batch, "strategies": results})
    if plot is not None:
        drawn = {_in_words(each): results[text] for text, each in strategies.items()}
        plot_scaling(drawn, f"{model}, {batch} images a worker, {place.name}", plot)
        console.print(f"drawn in {plot}")


def _paced(cluster: Cluster, model: str, accelerator: str | None, sample: str | None) -> Cluster:
    """The cluster, with ranks that compute as fast as was asked for."""
    if accelerator is not None and sample is not None:
        raise ConfigError("give --accelerator or --sample, not both: each says how long an image takes.")
    if sample == "cluster":
        return cluster
    seconds = parse_time(sample) if sample is not None else seconds_per_sample(accelerator or "p100", model)
    return replace(cluster, compute=Compute(sample_s=seconds, step_s=cluster.compute.step_s))


def _simulated(case: ScalingCase, numbers: list[int], console: Console) -> list[ScalingResult]:
    with console.status("", refresh_per_second=2) as status:

        def on_progress(workers: int, now_s: float, num_messages: int) -> None:
            status.update(f"{workers} workers: {format_time(now_s)} of virtual time, {num_messages:,} messages")

        return list(simulate_scaling(case, numbers, on_progress))


def _in_words(strategy: Strategy) -> str:
    if not isinstance(strategy, AllReduce):
        return str(strategy)
    return f"{label(strategy.algorithm)}, {format_size(strategy.bucket_bytes)} buckets"


def _table(title: str, rows: list[ScalingResult]) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("workers", "step", "images/s", "efficiency", "sent/step", "messages", "took"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.workers:,}",
            format_time(row.step_s),
            f"{row.images_per_s:,.0f}",
            f"{row.efficiency:.1%}",
            format_size(row.bytes_per_worker),
            f"{row.num_messages:,}",
            f"{row.wall_s:.1f} s",
        )
    return table
