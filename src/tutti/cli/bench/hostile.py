"""`tutti bench hostile`: training while hostile connections come to every listening port."""

from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tutti.bench.models import MODEL_NAMES, check_model_names
from tutti.cli.bench.output import format_ms
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.options import JsonFile


def hostile(
    model: Annotated[str, typer.Option(help=f"Model to train: {', '.join(MODEL_NAMES)}.")] = "mlp-0.1M",
    connections: Annotated[int, typer.Option(min=1, help="Hostile connections to each listening port.")] = 10_000,
    rate: Annotated[float, typer.Option(min=1, help="Connections a second, to all ports together.")] = 300,
    json_file: JsonFile = None,
) -> None:
    """Time training steps of 2 workers on this machine with and without hostile connections, in turn.

    The connections are of strangers, of liars that know the secret, and of former members. Those to a decoy show what
    the attacker and the kernel cost by themselves.
    """
    from tutti.bench.hostile import measure

    check_writable(json_file)
    check_model_names([model])
    with Progress(transient=True) as progress:
        bar = progress.add_task("hostile connections", total=None)
        row = measure(model, connections, rate, lambda done, total: progress.update(bar, completed=done, total=total))
    console, times = Console(), [format_ms(row["seconds"][name]) for name in ("quiet", "decoy", "attacked")]
    table = Table(title="Median milliseconds per step; ratios: medians over rounds")
    for heading in ("model", "ports", "connections", "quiet", "decoy", "attacked", "to quiet", "to decoy"):
        table.add_column(heading)
    counts, ratios = (row["ports"], row["connections"]), (row["to_quiet"], row["to_decoy"])
    table.add_row(row["model"], *map(str, counts), *times, *(f"{ratio:.3f}" for ratio in ratios))
    console.print(table)
    for name, (files, kib) in row["growth"].items():
        console.print(f"{name}: {files:+d} open files, {kib:+d} KiB of memory since the third round", highlight=False)
    write_json(json_file, [row])
