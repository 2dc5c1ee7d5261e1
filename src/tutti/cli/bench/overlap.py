"""`tutti bench overlap`: how much communication is hidden behind backward."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from tutti.bench.models import MODEL_NAMES, check_model_names
from tutti.cli.bench.output import plain_table
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.options import JsonFile, NumRounds, refuse_given, split_list
from tutti.errors import ConfigError

if TYPE_CHECKING:
    from tutti.bench.overlap import OverlapReport


def overlap(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL|MODULE:FACTORY",
            help="Model to train, instead of --models. A function must return a tutti.recipes.Recipe.",
        ),
    ] = None,
    models: Annotated[
        str, typer.Option(help=f"Comma-separated models to train: {', '.join(MODEL_NAMES)}.")
    ] = "cifar-quick,char-gpt",
    lab: Annotated[
        str, typer.Option("--lab", metavar="SPEC", help="Emulated hosts with one rank each; see `tutti lab`.")
    ] = "hosts=2,rate=100mbit",
    rounds: NumRounds = 7,
    json_file: JsonFile = None,
) -> None:
    """Time steps under Poseidon with and without overlap, and compare the saving with the possible one."""
    from tutti.bench.overlap import measure_overlap
    from tutti.launch.lab.lab import Lab, LabSpec

    check_writable(json_file)
    if model is not None:
        refuse_given(context, ("models",), f"changes nothing with the model {model}: give one of them.")
    names = split_list(models) if model is None else [model]
    check_model_names(names)
    # The formula of the possible saving knows one link, and one rank on each host.
    spec = LabSpec.parse(lab)
    if not names or spec.ranks_per_host > 1 or spec.hosts < 2 or len(set(spec.rates)) > 1:
        raise ConfigError(
            f"--models needs one or more, and --lab two hosts or more of one rank and one rate; got '{lab}'."
        )
    console = Console()
    reports = []
    with console.status("starting") as status, Lab(spec) as hosts:
        for name in names:
            status.update(f"measuring {name}")
            reports.append(measure_overlap(name, hosts, rounds))
    console.print(_table(reports, lab))
    write_json(json_file, {"lab": lab, "rows": [report.as_dict() for report in reports]})


def _table(reports: "list[OverlapReport]", lab: str) -> Table:
    table = plain_table(f"{lab}: milliseconds per step")
    table.caption = "hidden: saved by overlap; possible: what overlap could save, by the cost formula"
    table.add_column("", no_wrap=True)
    for heading in ("no exchange", "overlap", "none", "hidden", "possible", "share"):
        table.add_column(heading, justify="right")
    for report in reports:
        seconds = (report.solo_s, report.with_s, report.without_s, report.hidden_s, report.possible_s)
        table.add_row(report.model, *(f"{1e3 * value:.1f}" for value in seconds), f"{report.share:.0%}")
    return table
