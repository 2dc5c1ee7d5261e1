"""`tutti bench collectives`: every all-reduce algorithm, measured and predicted."""

from itertools import groupby
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tutti.cli.bench.output import note_missing_mpi, plain_table
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.lab_option import check_workers_or_lab, describe_hosts, launch_arguments, open_lab
from tutti.cli.options import JsonFile, LabText, NumRounds, PlotFile, split_list
from tutti.cluster import Link, format_size, parse_size
from tutti.errors import ConfigError
from tutti.report.plots import check_plot, label, plot_collectives

_SIZES = "1KiB,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB"
_DEFAULT_WORKERS = 4


def collectives(
    lab: LabText = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "-n",
            min=2,
            help="Number of processes on this machine.",
            show_default=str(_DEFAULT_WORKERS),
        ),
    ] = None,
    sizes: Annotated[
        str, typer.Option(help="Comma-separated message sizes of 4 bytes or more, such as 1KiB,4MiB.")
    ] = _SIZES,
    rounds: NumRounds = 9,
    plot: PlotFile = None,
    json_file: JsonFile = None,
) -> None:
    """Time every all-reduce algorithm beside its predicted cost, and beside those of Gloo and Open MPI."""
    from tutti.bench import collectives as benchmark
    from tutti.bench import under_mpi

    check_writable(json_file)
    check_plot(plot)
    check_workers_or_lab(workers, lab)
    workers = workers or _DEFAULT_WORKERS
    numbers = [parse_size(text) for text in split_list(sizes)]
    # The smallest message is one float32.
    if not numbers or min(numbers) < 4:
        raise ConfigError(f"--sizes takes 4 bytes or more, got '{sizes}'.")
    console = Console()
    with open_lab(lab) as hosts:
        where = describe_hosts(workers, hosts)
        with console.status(f"timing {len(numbers)} message sizes, {where}"):
            result = under_mpi.run(benchmark.measure, numbers, rounds, **launch_arguments(workers, hosts))
    link = Link(result["link"]["bits_per_s"], result["link"]["latency_s"])
    console.print(_table(result))
    console.print(f"{where}; measured link: {link}")
    console.print(f"'cheapest' uses {_cheapest_by_size(result['rows'])}")
    note_missing_mpi(console)
    write_json(json_file, {"lab": lab, **result})
    if plot is not None:
        plot_collectives(result, f"All-reduce, {where}", plot)
        console.print(f"figure written to {plot}")


def _table(result: dict[str, Any]) -> Table:
    """A row per algorithm, a column per size: milliseconds, and the prediction as a multiple of them."""
    rows = result["rows"]
    table = plain_table("Median milliseconds per all-reduce (predicted / measured)")
    table.add_column("", no_wrap=True)
    for row in rows:
        table.add_column(format_size(row["num_bytes"]), justify="right")
    for name in rows[0]["seconds"]:
        cells = []
        for row in rows:
            seconds = row["seconds"][name]
            cell = f"{seconds * 1e3:.2f}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"
            if name in row["predicted"]:
                cell += f"\n({row['predicted'][name] / seconds:.2f})"
            cells.append(cell)
        table.add_row(label(name).replace(" ", "\n"), *cells)
    return table


def _cheapest_by_size(rows: list[dict[str, Any]]) -> str:
    """The algorithms that `cheapest` chose, each with the smallest size from which on it was chosen."""
    chosen = [(name, list(group)) for name, group in groupby(rows, key=lambda row: row["cheapest"])]
    return ", ".join(f"{name} from {format_size(group[0]['num_bytes'])}" for name, group in chosen)
