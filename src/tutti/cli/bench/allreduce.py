"""`tutti bench allreduce`: the all-reduce alone, over message sizes."""

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tutti.cli.bench.mpi_progress import run_with_progress
from tutti.cli.bench.output import format_ratio, format_us, note_missing_mpi
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.options import JsonFile, NumRounds, parse_worker_counts
from tutti.cluster import format_size


def allreduce(
    workers: Annotated[
        str, typer.Option("--workers", "-n", help="Comma-separated numbers of workers to time, such as 2,4.")
    ] = "2",
    rounds: NumRounds = 15,
    json_file: JsonFile = None,
) -> None:
    """Time the all-reduce alone from 1 KiB to 64 MiB: Tutti's shared memory, Gloo and Open MPI."""
    from tutti.bench.allreduce import measure

    check_writable(json_file)
    console = Console()
    rows: list[dict[str, Any]] = []
    # A launch for each number: ranks cannot be added to a world that runs.
    for number in parse_worker_counts(workers, 2, "2,4"):
        rows += run_with_progress(f"all-reduce of {number} workers", measure, rounds, workers=number)
    console.print(_table(rows))
    note_missing_mpi(console)
    write_json(json_file, rows)


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Median microseconds per all-reduce; ×: Tutti's speed relative to Gloo and MPI")
    table.caption = "copied: the tensor is copied into shared memory first"
    for heading in ("size", "workers", "Gloo", "MPI", "Tutti", "copied", "× Gloo", "× MPI"):
        table.add_column(heading, justify="right")
    for row in rows:
        times = [format_us(row["seconds"].get(name)) for name in ("gloo", "mpi", "tutti", "tutti-copied")]
        ratios = [format_ratio(row["times_gloo"]), format_ratio(row["times_mpi"])]
        table.add_row(format_size(row["num_bytes"]), str(row["workers"]), *times, *ratios)
    return table
