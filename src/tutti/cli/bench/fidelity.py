"""`tutti bench fidelity`: the simulator's step times against measured ones."""

import statistics
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from tutti.cli.bench.output import format_ms, plain_table
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.options import JsonFile, split_list
from tutti.recipes import RECIPES

if TYPE_CHECKING:
    from tutti.bench.fidelity import SimulationCheck


def fidelity(
    models: Annotated[
        str, typer.Option(help=f"Comma-separated recipes to train: {', '.join(RECIPES)}.")
    ] = "mnist-mlp,cifar-quick,char-gpt",
    strategies: Annotated[
        str, typer.Option(help="Comma-separated strategies: ring, tree, butterfly, hierarchical.")
    ] = "ring,tree,butterfly,hierarchical",
    rates: Annotated[
        str, typer.Option(help="Comma-separated rates of the lab's links, such as 100mbit,1gbit.")
    ] = "100mbit,1gbit",
    steps: Annotated[int, typer.Option(min=1, help="Training steps of every job; the median is reported.")] = 30,
    json_file: JsonFile = None,
) -> None:
    """Compare the simulator with reality: the same jobs on a lab of four hosts and in virtual time."""
    from tutti.bench import fidelity as benchmark

    check_writable(json_file)
    jobs = benchmark.jobs_by_lab(split_list(models), split_list(strategies), split_list(rates))
    console = Console()
    with console.status("starting") as status:
        rows = benchmark.compare(jobs, steps, status.update)
    console.print(_table(rows, benchmark.HOSTS))
    errors = [abs(row.error) for row in rows]
    same = sum(row.same_bits for row in rows)
    console.print(
        f"error of the simulated step time: median {statistics.median(errors):.1%}, worst {max(errors):.1%}; "
        f"parameters are bit-identical in {same} of {len(rows)} jobs"
    )
    write_json(json_file, [row.as_dict() for row in rows])


def _table(rows: "list[SimulationCheck]", num_hosts: int) -> Table:
    table = plain_table(f"Median milliseconds per step, {num_hosts} hosts")
    for heading in ("model", "strategy", "rate", "ranks", "lab", "simulated", "error", "bits"):
        table.add_column(heading, justify="left" if heading in ("model", "strategy") else "right", no_wrap=True)
    for row in rows:
        where = (row.model, row.strategy, row.rate, str(num_hosts * row.ranks))
        times = format_ms(row.real_s), format_ms(row.simulated_s), f"{row.error:+.1%}"
        table.add_row(*where, *times, "same" if row.same_bits else "differ")
    return table
