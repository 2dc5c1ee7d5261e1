"""`tutti bench pipeline`: pipeline schedules beside the whole model in one process."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tutti.cli.bench.output import plain_table, show_activity
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.options import JsonFile, NumRounds, split_list
from tutti.errors import ConfigError, UnknownName
from tutti.report.plots import pyplot

if TYPE_CHECKING:
    from tutti.parallel.pipeline.settings import ScheduleName


def pipeline(
    workers: Annotated[int, typer.Option("--workers", "-n", min=2, help="Number of ranks. Each uses one core.")] = 2,
    schedules: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated schedules: sequential, gpipe, 1f1b, interleaved, zero-bubble.", show_default="all"
        ),
    ] = None,
    microbatches: Annotated[int, typer.Option(min=1, help="Number of microbatches per batch.")] = 16,
    width: Annotated[int, typer.Option(min=1, help="Width of each layer of the perceptron.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Samples per step.")] = 4096,
    fixed_time: Annotated[
        float | None,
        typer.Option(
            "--fixed-time",
            min=0.0,
            metavar="MICROSECONDS",
            help="Replace the layers by ones that wait this long per sample and compute nothing.",
        ),
    ] = None,
    rounds: NumRounds = 9,
    plot: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Draw a timeline of every schedule into this folder.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Time a perceptron of equal layers under every pipeline schedule: speed-up, and time that ranks wait.

    With --fixed-time every layer takes exactly the same time, so that all waiting is due to the schedule.
    """
    from tutti.bench.pipeline import PipelineBenchmark, measure
    from tutti.launch import launch

    check_writable(json_file)
    names = _parse_schedules(schedules)
    # Here, because ranks would all raise the same, after they have been started.
    if batch % microbatches:
        raise ConfigError(f"--batch {batch} does not divide into {microbatches} microbatches.")
    if plot is not None:
        # Refuses a missing matplotlib now, and not after minutes of measuring.
        pyplot()
        plot.mkdir(parents=True, exist_ok=True)
    console = Console()
    with console.status(f"starting {workers} ranks") as status:
        layer_s = None if fixed_time is None else 1e-6 * fixed_time
        # 16 layers per rank: they divide evenly also into two stages per rank.
        benchmark = PipelineBenchmark(names, microbatches, rounds, width, 16 * workers, batch, layer_s)
        show = show_activity(status, f"timing {len(names)} schedules on {workers} ranks: ")
        result = launch(measure, benchmark, workers=workers, watch=show)[0]
    console.print(_table(result))
    write_json(json_file, result)
    if plot is not None:
        _draw(result, plot)
        console.print(f"figures written to {plot}")


def _parse_schedules(text: str | None) -> "list[ScheduleName]":
    """The schedules of a comma-separated list; all without one."""
    from tutti.parallel.pipeline.settings import SCHEDULES

    if text is None:
        return list(SCHEDULES)
    names: list[ScheduleName] = []
    for name in split_list(text):
        known = next((schedule for schedule in SCHEDULES if schedule == name), None)
        if known is None:
            raise UnknownName("schedule", name, SCHEDULES)
        names.append(known)
    return names


def _table(result: dict[str, Any]) -> Table:
    """A row per schedule, beside one process that has the whole model."""
    table = plain_table(f"{result['workers']} ranks, {result['microbatches']} microbatches")
    table.caption = "waiting: share of the time; model: from the stages' median times; formula: from their number"
    table.add_column("")
    for heading in ("ms per step", "speed-up", "waiting", "model", "formula"):
        table.add_column(heading, justify="right")
    table.add_row("one process", f"{1e3 * result['solo_s']:.1f}", "1.00", "", "", "")
    for row in result["rows"]:
        shares = (f"{row[key]:.1%}" for key in ("bubble", "clock_bubble"))
        # The formula is that of GPipe and 1F1B; the other schedules have bubbles of their own.
        ideal = f"{row['ideal_bubble']:.1%}" if row["schedule"] in ("gpipe", "1f1b") else ""
        speedup = f"{result['solo_s'] / row['seconds']:.2f}"
        table.add_row(row["schedule"], f"{1e3 * row['seconds']:.1f}", speedup, *shares, ideal)
    return table


def _draw(result: dict[str, Any], folder: Path) -> None:
    """Draw each schedule, measured and modelled; and a schedule beside no pipeline, if both were timed."""
    from tutti.bench.pipeline import timeline_from
    from tutti.report.pipeline import plot_timelines

    by_name = {row["schedule"]: row for row in result["rows"]}
    for name, row in by_name.items():
        panels = {
            "measured step": timeline_from(row["spans"], result),
            "modelled step": timeline_from(row["clock_spans"], result),
        }
        plot_timelines(panels, f"{name}, {result['microbatches']} microbatches", folder / f"{name}.png")
    # A pair that shows what pipelining gains, if both were timed.
    pipelined = next((name for name in ("gpipe", "1f1b") if name in by_name), None)
    if "sequential" in by_name and pipelined is not None:
        pair = {f"with pipeline ({pipelined})": pipelined, "without pipeline": "sequential"}
        for kind, source in (("spans", "measured"), ("clock_spans", "modelled")):
            panels = {label: timeline_from(by_name[name][kind], result) for label, name in pair.items()}
            plot_timelines(
                panels,
                f"With and without pipeline, {result['microbatches']} microbatches ({source})",
                folder / f"with-and-without-{source}.png",
            )
