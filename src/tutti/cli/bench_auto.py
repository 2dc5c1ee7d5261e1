"""`tutti bench auto`: is what the planner chooses by itself ever slower than DDP?"""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tutti.bench import auto as bench
from tutti.bench.step import CASES
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.place import check_one_place, described, lab_if_any
from tutti.errors import ConfigError, UnknownName
from tutti.launch import launch
from tutti.recipes import RECIPES


def auto(
    models: Annotated[str, typer.Option(help=f"Some of {', '.join(CASES)}.")] = ",".join(RECIPES),
    lab: Annotated[
        str | None, typer.Option("--lab", metavar="SPEC", help="On hosts made for it, such as hosts=4,rate=1gbit.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", "-n", min=2, help="Workers on this machine; 2 by default.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of every way, in turn; the median counts.")] = 7,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")] = None,
) -> None:
    """Steps under what Auto settles on, beside DDP, plain all-reduce and no exchange; and what its planning cost."""
    check_writable(json_file)
    check_one_place(workers, lab)
    names = list(dict.fromkeys(name for name in models.split(",") if name))
    if not names:
        raise ConfigError("--models needs one or more.")
    for name in names:
        if name not in CASES:
            raise UnknownName("model", name, CASES)
    console, found = Console(), []
    with lab_if_any(lab) as hosts, console.status("starting") as status:
        for name in names:

            def show(rank: int, values: dict[str, Any], name: str = name) -> None:
                if rank == 0 and "doing" in values:
                    status.update(f"{name}: {values['doing']}")

            everyones = launch(
                bench.measure, name, rounds, workers=None if hosts else workers or 2, lab=hosts, watch=show
            )
            found.append(everyones[0])
    where = described(workers or 2, None) if lab is None else f"lab {lab}"
    console.print(_table(found, where))
    write_json(json_file, {"place": where, "rows": [each.as_dict() for each in found]})


def _table(found: list[bench.AutoReport], where: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=f"{where}: ms a step")
    table.add_column("")
    for heading in ("no exchange", "DDP", "native", "auto", "× DDP"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("auto chose", overflow="fold")
    table.add_column("after", justify="right", no_wrap=True)
    table.add_column("planning", justify="right", no_wrap=True)
    for each in found:
        times = (f"{1e3 * each.seconds[way]:.1f}" for way in ("solo", "DDP", "native", "auto"))
        cost = f"{max(0.0, each.planning_s):.1f} s"
        table.add_row(each.model, *times, f"{each.times_ddp:.2f}", each.chosen, f"{each.steps} steps", cost)
    return table
