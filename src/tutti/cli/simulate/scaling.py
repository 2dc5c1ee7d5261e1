"""`tutti simulate scaling`: the throughput of a large model on many simulated workers."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tutti.cli.bench.output import plain_table
from tutti.cli.bench.strategies import split_strategies
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.options import ClusterText, JsonFile, PlotFile, parse_worker_counts
from tutti.cluster import Cluster, Compute, format_size, format_time, parse_time
from tutti.errors import ConfigError, UnknownName
from tutti.recipes.models import LARGE
from tutti.recipes.speeds import IMAGES_PER_S, seconds_per_sample
from tutti.report.plots import check_plot
from tutti.report.scaling import plot_scaling

if TYPE_CHECKING:
    from tutti.simulation.runs.scaling import ScalingCase, ScalingResult

_DEFAULT_STRATEGY = "ring:bucket_bytes=67108864"
"""Buckets of 64 MiB: a ring cuts each into as many messages as there are ranks."""


def scaling(
    model: Annotated[str, typer.Option(help=f"Model to train: {', '.join(LARGE)}.")] = "resnet50",
    workers: Annotated[
        str, typer.Option("--workers", "-n", help="Comma-separated numbers of workers, such as 8,64,512.")
    ] = "8,64,512",
    cluster: ClusterText = "ethernet-10g",
    strategy: Annotated[
        str, typer.Option(help="Synchronisation strategy, or several with commas between.")
    ] = _DEFAULT_STRATEGY,
    batch: Annotated[int, typer.Option(min=1, help="Images per worker and step.")] = 64,
    accelerator: Annotated[
        str | None,
        typer.Option(
            help=f"Accelerator whose published speed is assumed: {', '.join(IMAGES_PER_S)}.", show_default="p100"
        ),
    ] = None,
    sample_time: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Computing time of one image, such as 4.5ms; 'cluster' takes the cluster's."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps to simulate.")] = 3,
    plot: PlotFile = None,
    json_file: JsonFile = None,
) -> None:
    """Simulate the training of a large model from its sizes alone: images per second, and scaling efficiency.

    The simulation takes time in proportion to the number of messages. A ring sends 2 × workers² per bucket and step.
    """
    from tutti.simulation.runs.scaling import ScalingCase
    from tutti.strategies import parse

    check_writable(json_file)
    check_plot(plot)
    if model not in LARGE:
        raise UnknownName("model", model, LARGE)
    simulated = _with_sample_time(Cluster.load(cluster), model, accelerator, sample_time)
    numbers = parse_worker_counts(workers, 1, "8,64,512")
    for number in numbers:
        simulated.place(number)  # Refuses too many ranks now, not after the first simulations.
    # By the text as given, which is the key in the JSON file; tables show the canonical spelling.
    strategies = {text: parse(text) for text in split_strategies(strategy)}
    console = Console()
    title = f"{model}, {batch} images per worker, {simulated.name}"
    console.print(f"{title}: {simulated.compute}")
    results: dict[str, list[dict[str, Any]]] = {}
    for text, parsed in strategies.items():
        case = ScalingCase(model=model, cluster=simulated, strategy=parsed, batch_size=batch, steps=steps)
        rows = _simulate(case, numbers, console)
        console.print(_table(str(parsed), rows))
        results[text] = [row.as_dict() for row in rows]
    write_json(json_file, {"model": model, "cluster": simulated.to_toml(), "batch_size": batch, "strategies": results})
    if plot is not None:
        plot_scaling({str(parsed): results[text] for text, parsed in strategies.items()}, title, plot)
        console.print(f"figure written to {plot}")


def _with_sample_time(cluster: Cluster, model: str, accelerator: str | None, sample_time: str | None) -> Cluster:
    """The cluster with the computing time of an accelerator, or with one that was given."""
    if accelerator is not None and sample_time is not None:
        raise ConfigError("give --accelerator or --sample-time, not both: each sets the computing time of an image.")
    if sample_time == "cluster":
        return cluster
    seconds = parse_time(sample_time) if sample_time is not None else seconds_per_sample(accelerator or "p100", model)
    # The time per step, which does not depend on the batch, stays the cluster's own.
    return replace(cluster, compute=Compute(sample_s=seconds, step_s=cluster.compute.step_s))


def _simulate(case: "ScalingCase", numbers: list[int], console: Console) -> "list[ScalingResult]":
    from tutti.simulation.runs.scaling import scaling as simulate_scaling

    with console.status("", refresh_per_second=2) as status:

        def show(workers: int, now_s: float, num_messages: int) -> None:
            status.update(f"{workers} workers: {format_time(now_s)} of virtual time, {num_messages:,} messages")

        return list(simulate_scaling(case, numbers, show))


def _table(title: str, rows: "list[ScalingResult]") -> Table:
    table = plain_table(title)
    table.caption = "sent: bytes per worker and step; simulated in: real time"
    for heading in ("workers", "step", "images/s", "efficiency", "sent", "messages", "simulated in"):
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
