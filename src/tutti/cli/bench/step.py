"""`tutti bench step`: training steps under Tutti beside DDP and Open MPI."""

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tutti.bench.models import MODEL_NAMES, check_model_names
from tutti.cli.bench.mpi_progress import run_with_progress
from tutti.cli.bench.output import format_ms, format_ratio, note_missing_mpi
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.options import JsonFile, NumRounds, parse_worker_counts, split_list


def step(
    models: Annotated[
        str, typer.Option(help=f"Comma-separated models to train: {', '.join(MODEL_NAMES)}.", show_default="all")
    ] = ",".join(MODEL_NAMES),
    workers: Annotated[
        str, typer.Option("--workers", "-n", help="Comma-separated numbers of workers to time, such as 2,4.")
    ] = "2,4",
    rounds: NumRounds = 15,
    json_file: JsonFile = None,
) -> None:
    """Time training steps without communication, under DDP, under Tutti and with a flat Open MPI all-reduce."""
    from tutti.bench.step import measure

    check_writable(json_file)
    names = split_list(models)
    check_model_names(names)
    console = Console()
    rows: list[dict[str, Any]] = []
    for number in parse_worker_counts(workers, 2, "2,4"):
        rows += run_with_progress(f"training steps of {number} workers", measure, names, rounds, workers=number)
    console.print(_table(rows))
    note_missing_mpi(console)
    write_json(json_file, rows)


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Median milliseconds per step; ×: Tutti's speed relative to DDP and MPI")
    table.caption = "efficiency: Tutti's speed relative to no communication"
    for heading in ("model", "workers", "solo", "DDP", "MPI", "Tutti", "× DDP", "× MPI", "efficiency"):
        table.add_column(heading, justify="left" if heading == "model" else "right", no_wrap=True)
    for row in rows:
        times = [format_ms(row["seconds"].get(name)) for name in ("solo", "ddp", "mpi", "tutti")]
        ratios = [format_ratio(row["times_ddp"]), format_ratio(row["times_mpi"]), f"{row['efficiency']:.0%}"]
        table.add_row(row["model"], str(row["workers"]), *times, *ratios)
    return table
