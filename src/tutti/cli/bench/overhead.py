"""`tutti bench overhead`: the cost of Tutti for a single rank."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tutti.cli.bench.output import format_ms
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.options import JsonFile, NumRounds
from tutti.errors import ConfigError
from tutti.recipes import RECIPES


def overhead(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE|MODULE:FACTORY",
            help=f"Recipe to time: {', '.join(RECIPES)}, or a function that returns a tutti.recipes.Recipe.",
            show_default="cifar-quick and char-gpt",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Device to train on: cpu or cuda.")] = "cpu",
    rounds: NumRounds = 15,
    compiled: Annotated[bool, typer.Option(metavar="", help="Also time models under torch.compile.")] = True,
    json_file: JsonFile = None,
) -> None:
    """Time one rank under Tutti beside the bare training step: the cost for a run that needs no communication."""
    from tutti.bench.overhead import CASES, STEPS_PER_ROUND, case_from_recipe, measure

    check_writable(json_file)
    if device not in STEPS_PER_ROUND:
        raise ConfigError(f"--device takes {' or '.join(STEPS_PER_ROUND)}, got '{device}'.")
    cases = CASES if recipe is None else {recipe: case_from_recipe(recipe)}
    console = Console()
    with console.status(f"timing {', '.join(cases)} on {device}"):
        rows = measure(device, rounds, compiled, cases)
    table = Table(title=f"Median milliseconds per step on {device}, one rank")
    for heading in ("model", "precision", "mode", "bare", "Tutti", "ratio"):
        table.add_column(heading)
    for row in rows:
        mode = "compiled" if row["compiled"] else "eager"
        times = format_ms(row["seconds"]["bare"]), format_ms(row["seconds"]["tutti"])
        table.add_row(row["case"], row["precision"], mode, *times, f"{row['ratio']:.3f}")
    console.print(table)
    write_json(json_file, rows)
