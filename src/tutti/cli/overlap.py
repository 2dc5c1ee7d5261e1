"""`tutti bench overlap`: what exchange behind backward is measure_overlap."""

from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tutti.bench.overlap import OverlapReport, measure_overlap
from tutti.bench.step import CASES
from tutti.cli.json_file import check_writable, write_json
from tutti.errors import ConfigError, UnknownName
from tutti.launch.lab.lab import Lab, LabSpec


def overlap(
    models: Annotated[str, typer.Option(help=f"Some of {', '.join(CASES)}.")] = "cifar-quick,char-gpt",
    lab: Annotated[str, typer.Option("--lab", metavar="SPEC", help="The hosts, one rank on each.")] = (
        "hosts=2,rate=100mbit"
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of every way, in turn; the median counts.")] = 7,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")] = None,
) -> None:
    """Steps under poseidon with overlap and without, and how much of what could be hidden under backward is."""
    check_writable(json_file)
    names = [name for name in models.split(",") if name]
    for name in names:
        if name not in CASES:
            raise UnknownName("model", name, CASES)
    spec = LabSpec.parse(lab)
    if not names or spec.ranks_per_host > 1 or spec.hosts < 2 or len(set(spec.rates)) > 1:
        raise ConfigError(
            f"--models needs one or more, and --lab two hosts or more of one rank and one rate; got '{lab}'."
        )
    console = Console()
    found = []
    with console.status("measuring") as status, Lab(spec) as hosts:
        for name in names:
            status.update(f"measuring {name}")
            found.append(measure_overlap(name, hosts, rounds))
    console.print(_table(found, lab))
    write_json(json_file, {"lab": lab, "rows": [each.as_dict() for each in found]})


def _table(found: list[OverlapReport], lab: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=f"{lab}: ms a step")
    table.add_column("")
    for heading in ("no exchange", "overlap", "none", "hidden", "could be", ""):
        table.add_column(heading, justify="right")
    for each in found:
        seconds = (each.solo_s, each.with_s, each.without_s, each.hidden_s, each.could_s)
        table.add_row(each.model, *(f"{1e3 * one:.1f}" for one in seconds), f"{each.share:.0%}")
    return table
