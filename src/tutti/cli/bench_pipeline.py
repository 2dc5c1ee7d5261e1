"""`tutti bench pipeline`: stages on several processes beside the whole model in one."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tutti.bench.pipeline import PipelineBenchmark, measure, timeline_of
from tutti.cli.json_file import check_writable, write_json
from tutti.errors import ConfigError, UnknownName
from tutti.launch import launch
from tutti.parallel.pipeline.settings import SCHEDULES, ScheduleName
from tutti.report.pipeline import plot_timelines
from tutti.report.plots import pyplot


def pipeline(
    workers: Annotated[int, typer.Option("--workers", "-n", min=2, help="Ranks, with a core each.")] = 2,
    schedules: Annotated[str, typer.Option(help=f"Some of {', '.join(SCHEDULES)}.")] = ",".join(SCHEDULES),
    microbatches: Annotated[int, typer.Option(min=1, help="Into how many parts a batch is cut.")] = 16,
    width: Annotated[int, typer.Option(min=1, help="Of each of the model's layers.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Samples of a step.")] = 4096,
    steady: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="MICROSECONDS",
            help="Layers that take so long a sample, by the clock, and compute nothing: waiting is then Tutti's alone.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of every way, in turn; the median counts.")] = 9,
    plot: Annotated[Path | None, typer.Option(metavar="DIR", help="Draw every schedule into this folder.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")] = None,
) -> None:
    """A perceptron of equal layers in stages, each process on one core: speed-up, and how long ranks wait."""
    check_writable(json_file)
    names = _names(schedules)
    if batch % microbatches:
        raise ConfigError(f"--batch {batch} does not divide into {microbatches} microbatches.")
    if plot is not None:
        pyplot()
        plot.mkdir(parents=True, exist_ok=True)
    console = Console()
    with console.status(f"starting {workers} ranks") as status:

        def show(rank: int, values: dict[str, Any]) -> None:
            if rank == 0:
                status.update(f"timing {len(names)} schedules on {workers} ranks: {values['doing']}")

        steady_s = None if steady is None else 1e-6 * steady
        request = PipelineBenchmark(names, microbatches, rounds, width, 16 * workers, batch, steady_s)
        result = launch(measure, request, workers=workers, watch=show)[0]
    console.print(_table(result))
    write_json(json_file, result)
    if plot is not None:
        _draw(result, plot)
        console.print(f"drawn in {plot}")


def _names(text: str) -> list[ScheduleName]:
    found: list[ScheduleName] = []
    for name in text.split(","):
        known = next((each for each in SCHEDULES if each == name), None)
        if known is None:
            raise UnknownName("schedule", name, SCHEDULES)
        found.append(known)
    return found


def _table(result: dict[str, Any]) -> Table:
    title = f"{result['workers']} ranks, {result['microbatches']} microbatches"
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title)
    table.add_column("")
    for heading in ("ms a step", "speed-up", "waiting", "by clock", "by formula"):
        table.add_column(heading, justify="right")
    table.add_row("one process", f"{1e3 * result['solo_s']:.1f}", "1.00", "", "", "")
    for row in result["rows"]:
        shares = (f"{row[key]:.1%}" for key in ("bubble", "clock_bubble"))
        ideal = f"{row['ideal_bubble']:.1%}" if row["schedule"] in ("gpipe", "1f1b") else ""
        speedup = f"{result['solo_s'] / row['seconds']:.2f}"
        table.add_row(row["schedule"], f"{1e3 * row['seconds']:.1f}", speedup, *shares, ideal)
    return table


def _draw(result: dict[str, Any], folder: Path) -> None:
    by_name = {row["schedule"]: row for row in result["rows"]}
    for name, row in by_name.items():
        both = {"a real step": timeline_of(row["spans"], result), "by a clock": timeline_of(row["clock_spans"], result)}
        plot_timelines(both, f"{name}, {result['microbatches']} microbatches", folder / f"{name}.png")
    with_one = next((name for name in ("gpipe", "1f1b") if name in by_name), None)
    if "in-turn" in by_name and with_one is not None:
        pair = {f"with pipeline ({with_one})": with_one, "without": "in-turn"}
        for kind, where in (("spans", "real"), ("clock_spans", "clock")):
            panels = {label: timeline_of(by_name[name][kind], result) for label, name in pair.items()}
            plot_timelines(
                panels,
                f"with and without pipeline, {result['microbatches']} microbatches ({where})",
                folder / f"with-and-without-{where}.png",
            )
