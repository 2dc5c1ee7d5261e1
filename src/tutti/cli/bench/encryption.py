"""`tutti bench encryption`: what TLS between hosts costs."""

from typing import Annotated, Any

import typer
from rich.console import Console

from tutti.cli.bench.output import format_ms, plain_table
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.lab_option import check_workers_or_lab, describe_hosts, open_lab
from tutti.cli.options import JsonFile, NumRounds, split_list
from tutti.cluster import format_size, parse_size
from tutti.errors import ConfigError

_SIZES = "1KiB,64KiB,1MiB,16MiB"


def encryption(
    lab: Annotated[
        str, typer.Option(metavar="SPEC", help="Emulated hosts, such as hosts=2,rate=10gbit. Needs root.")
    ] = "hosts=2,rate=1gbit",
    sizes: Annotated[
        str, typer.Option(help="Comma-separated message sizes of 4 bytes or more.")
    ] = "1KiB,64KiB,1MiB,16MiB",
    rounds: NumRounds = 21,
    json_file: JsonFile = None,
) -> None:
    """Time all-reduces between lab hosts over TLS and over connections in the clear, in turn."""
    from tutti.bench.encryption import measure
    from tutti.launch import launch

    check_writable(json_file)
    check_workers_or_lab(None, lab)
    numbers = [parse_size(text) for text in split_list(sizes)]
    if not numbers or min(numbers) < 4:
        raise ConfigError(f"--sizes takes 4 bytes or more, got '{sizes}'.")
    console = Console()
    with open_lab(lab) as hosts, console.status(f"timing {len(numbers)} message sizes"):
        assert hosts is not None
        rows: list[dict[str, Any]] = launch(measure, numbers, rounds, on=hosts, transport="sockets")[0]
    table = plain_table(f"Median milliseconds per all-reduce by a ring, {describe_hosts(0, lab)}")
    for heading in ("size", "clear", "TLS", "TLS to clear"):
        table.add_column(heading, justify="right")
    for row in rows:
        times = [format_ms(row["seconds"][name]) for name in ("clear", "tls")]
        table.add_row(format_size(row["num_bytes"]), *times, f"{row['ratio']:.2f}")
    console.print(table)
    write_json(json_file, {"lab": lab, "rows": rows})
