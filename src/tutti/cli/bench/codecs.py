"""`tutti bench codecs`: the speed and the error of every codec."""

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tutti.cli.bench.output import format_ratio, plain_table
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.options import JsonFile, NumRounds
from tutti.cluster import format_size, parse_size


def codecs(
    size: Annotated[str, typer.Option(help="Size of the float32 tensor to compress, such as 16MiB.")] = "16MiB",
    device: Annotated[str, typer.Option(help="Device to compress on: cpu (one thread) or cuda.")] = "cpu",
    rounds: NumRounds = 15,
    json_file: JsonFile = None,
) -> None:
    """Time every codec, with and without error feedback, beside a copy of the same tensor."""
    import torch

    from tutti.bench.codecs import measure

    check_writable(json_file)
    console = Console()
    with console.status("starting") as status:
        result = measure(device, parse_size(size), rounds, status.update)
    console.print(_table(result["rows"]))
    copied = result["num_bytes"] / result["copy_s"] / 1e9
    where = "one CPU thread" if device == "cpu" else torch.cuda.get_device_name()
    console.print(f"{format_size(result['num_bytes'])} of float32 on {where}; copying it: {copied:.1f} GB/s")
    write_json(json_file, result)


def _table(rows: list[dict[str, Any]]) -> Table:
    table = plain_table("Gigabytes of float32 per second; +: with error feedback")
    table.caption = "error: squared error of one call, relative to sending zeros"
    for heading in ("codec", "encode", "decode", "both", "of copy", "bytes", "smaller", "error"):
        table.add_column(heading, justify="left" if heading == "codec" else "right", no_wrap=True)
    for row in rows:
        speeds = [f"{row['gb_per_s'][name]:.2f}" for name in ("encode", "decode", "both")]
        size = f"{row['packet_bytes']:,}", format_ratio(row["ratio"])
        name = f"{row['codec']} +" if row["feedback"] else row["codec"]
        table.add_row(name, *speeds, f"{row['of_copy']:.0%}", *size, f"{row['error']:.1e}")
    return table
