"""`tutti bench startup`: the time until a command prints its first line or takes its first step."""

from typing import Annotated

import typer
from rich.console import Console

from tutti.cli.bench.output import plain_table
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.options import JsonFile, NumRounds


def startup(
    workers: Annotated[int, typer.Option("--workers", "-n", min=1, help="Number of worker processes to start.")] = 4,
    rounds: NumRounds = 5,
    json_file: JsonFile = None,
) -> None:
    """Time how long commands take to start: `tutti --help`, `tutti run`, `tutti train`, and torchrun beside them."""
    from tutti.bench.startup import measure

    check_writable(json_file)
    console = Console()
    with console.status("starting") as status:
        report = measure(workers, rounds, status.update)
    table = plain_table(f"Median seconds of {rounds} rounds, {workers} workers")
    table.add_column("command")
    table.add_column("seconds", justify="right")
    for command, seconds in report.seconds.items():
        table.add_row(command, f"{seconds:.2f}")
    console.print(table)
    console.print(f"`tutti run` on an empty script takes {report.times_torchrun:.2f} × torchrun.")
    write_json(json_file, report.as_dict())
