"""`tutti bench auto`: the strategy that `auto` chooses, beside DDP."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from tutti.bench.models import MODEL_NAMES, check_model_names
from tutti.cli.bench.output import plain_table, show_activity
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.lab_option import check_workers_or_lab, describe_hosts, launch_arguments, open_lab
from tutti.cli.options import JsonFile, LabText, NumRounds, split_list
from tutti.cli.strategy_cell import StrategyCell
from tutti.errors import ConfigError
from tutti.recipes import RECIPES

if TYPE_CHECKING:
    from tutti.bench.auto import AutoReport

_DEFAULT_WORKERS = 2


def auto(
    models: Annotated[str, typer.Option(help=f"Comma-separated models to train: {', '.join(MODEL_NAMES)}.")] = ",".join(
        RECIPES
    ),
    lab: LabText = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", "-n", min=2, help="Number of workers on this machine.", show_default=str(_DEFAULT_WORKERS)
        ),
    ] = None,
    rounds: NumRounds = 7,
    json_file: JsonFile = None,
) -> None:
    """Time steps under the strategy that `auto` chooses, beside DDP and plain all-reduce, and the cost of choosing."""
    from tutti.bench.auto import measure
    from tutti.launch import launch

    check_writable(json_file)
    check_workers_or_lab(workers, lab)
    names = split_list(models)
    if not names:
        raise ConfigError("--models needs one or more.")
    check_model_names(names)
    workers = workers or _DEFAULT_WORKERS
    console, reports = Console(), []
    with open_lab(lab) as hosts, console.status("starting") as status:
        for name in names:
            show = show_activity(status, f"{name}: ")
            reports.append(launch(measure, name, rounds, watch=show, **launch_arguments(workers, hosts))[0])
    where = describe_hosts(workers, lab)
    console.print(_table(reports, where))
    write_json(json_file, {"place": where, "rows": [report.as_dict() for report in reports]})


def _table(reports: "list[AutoReport]", where: str) -> Table:
    table = plain_table(f"{where}: milliseconds per step")
    table.caption = "× DDP: speed of auto relative to DDP; planning: time spent on the choice, after how many steps"
    table.add_column("")
    for heading in ("no exchange", "DDP", "native", "auto", "× DDP"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("auto chose")
    table.add_column("after", justify="right", no_wrap=True)
    table.add_column("planning", justify="right", no_wrap=True)
    for report in reports:
        times = (f"{1e3 * report.seconds[name]:.1f}" for name in ("solo", "DDP", "native", "auto"))
        cost = f"{max(0.0, report.planning_s):.1f} s"
        table.add_row(
            report.model, *times, f"{report.times_ddp:.2f}", StrategyCell(report.chosen), f"{report.steps} steps", cost
        )
    return table
