"""`tutti bench startup`: how long a user waits for the first line, and for the first step."""

from pathlib import Path
from typing import Annotated

import typer


def startup(
    workers: Annotated[int, typer.Option("--workers", "-n", min=1, help="Number of worker processes to start.")] = 4,
    rounds: Annotated[
        int, typer.Option(min=1, help="Repetitions, interleaved with the other commands; the median is reported.")
    ] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
) -> None:
    """Time how long commands take to start: `tutti --help`, `tutti run`, `tutti train`, and torchrun beside them."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from tutti.bench.startup import measure
    from tutti.cli.json_file import check_writable, write_json

    check_writable(json_file)
    console = Console()
    with console.status("starting") as status:
        report = measure(workers, rounds, status.update)
    table = Table(box=SIMPLE_HEAD, title=f"seconds, median of {rounds}; {workers} workers")
    table.add_column("command")
    table.add_column("s", justify="right")
    for command, seconds in report.seconds.items():
        table.add_row(command, f"{seconds:.2f}")
    console.print(table)
    console.print(f"`tutti run` on an empty script takes {report.times_torchrun:.2f} × torchrun.")
    write_json(json_file, report.as_dict())
