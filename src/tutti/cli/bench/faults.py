"""`tutti bench faults`: is the right rank named when something goes wrong, and how soon?"""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from tutti.cli.json_file import check_writable, write_json
from tutti.cli.lab_option import check_workers_or_lab
from tutti.cli.options import JsonFile, split_list
from tutti.errors import ConfigError

if TYPE_CHECKING:
    from tutti.bench.fault_outcomes import Outcome
    from tutti.bench.faults import Control


def faults(
    kinds: Annotated[str, typer.Option(help="Comma-separated kinds of faults, or 'none'.", show_default="all")] = "all",
    repeats: Annotated[int, typer.Option(help="Faults of each kind under each strategy.", min=1)] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the ranks and steps at which faults happen.")] = 0,
    control_steps: Annotated[
        int, typer.Option(help="Undisturbed steps of each strategy, in which every report is a false alarm.", min=0)
    ] = 2000,
    load: Annotated[int, typer.Option(help="Number of busy processes beside the jobs.", min=0)] = 0,
    lab: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="Inject faults on emulated hosts, such as hosts=3,rate=1gbit. Needs root."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", metavar="", help="Two kinds of faults under one strategy, once each.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Inject faults into one rank of training jobs of 3 workers, and check who is named, why, and how soon.

    Example: tutti bench faults --kinds killed,stopped --repeats 5
    """
    from tutti.bench.faults import LAB_STRATEGIES, STRATEGIES, busy_processes, cases, measure, undisturbed

    check_writable(json_file)
    check_workers_or_lab(None, lab)
    chosen = _kinds(kinds, lab)
    strategies = list(STRATEGIES) if lab is None else list(LAB_STRATEGIES)
    if lab is not None:
        control_steps = 0  # Other hosts of a lab share this machine: they are no other case.
    if quick:
        chosen, strategies, repeats, control_steps = (
            ["killed", "slow loader"],
            strategies[:1],
            1,
            min(control_steps, 50),
        )
    console = Console()
    planned, number = cases(chosen, strategies, repeats, seed, lab), 0
    with busy_processes(load), console.status("injecting faults") as status:

        def done(outcome: "Outcome") -> None:
            nonlocal number
            number += 1
            status.update(f"injecting faults: {number} of {len(planned)}, last '{outcome.kind}'")

        outcomes = measure(planned, done) if planned else []
        status.update("training undisturbed")
        controls = [undisturbed(strategy, control_steps) for strategy in strategies if control_steps]
    _show(console, _table(outcomes, chosen, strategies) if outcomes else None, outcomes, controls)
    write_json(json_file, [*map(asdict, outcomes), *map(asdict, controls)])


def _show(console: Console, table: Table | None, outcomes: "list[Outcome]", controls: "list[Control]") -> None:
    """Print the table, the sums, and what was said where something was wrong."""
    from tutti.bench.fault_outcomes import summary

    if table is not None:
        console.print(table)
    total = summary(outcomes)
    alarms, steps = sum(each.false_alarms for each in controls), sum(each.steps for each in controls)
    injected = (
        f"{total['faults']} faults: right rank in {100 * total['rank_right']:.0f} %, right cause in "
        f"{100 * total['cause_right']:.0f} %, ended as promised in {100 * total['ended_right']:.0f} %; "
        f"{total['left_behind']} processes left behind; "
    )
    console.print(f"{injected if outcomes else ''}{alarms} false alarms in {steps} steps", highlight=False)
    for outcome in outcomes:
        for line in filter(None, outcome.said):
            console.print(f"{outcome.kind}, {outcome.strategy}, rank {outcome.victim}: {line}", markup=False)
    for control in controls:
        for line in control.said:
            console.print(f"undisturbed, {control.strategy}: {line}", markup=False)


def _kinds(text: str, lab: str | None) -> list[str]:
    """The kinds of faults that the user asks for."""
    from tutti.bench.fault_outcomes import KINDS, LAB_KINDS

    known = KINDS if lab is None else LAB_KINDS
    chosen = {"all": list(known), "none": []}.get(text)
    chosen = split_list(text) if chosen is None else chosen
    if unknown := [kind for kind in chosen if kind not in known]:
        where = "" if lab is None else " in a lab"
        raise ConfigError(f"no kind of fault{where} is called '{unknown[0]}'. Known: {', '.join(known)}.")
    return chosen


def _table(outcomes: "list[Outcome]", kinds: list[str], strategies: list[str]) -> Table:
    from tutti.bench.fault_outcomes import median_s, worst_s

    table = Table(title="Faults with right rank / right cause / injected; median and longest ms until they are known")
    for heading in ("fault", *strategies):
        table.add_column(heading, justify="left" if heading == "fault" else "right", no_wrap=True)
    for kind in kinds:
        cells = []
        for strategy in strategies:
            found = [each for each in outcomes if (each.kind, each.strategy) == (kind, strategy)]
            right = f"{sum(each.rank_right for each in found)}/{sum(each.cause_right for each in found)}/{len(found)}"
            median, worst = median_s(found), worst_s(found)
            times = "" if median is None or worst is None else f" {1000 * median:.0f} {1000 * worst:.0f}"
            cells.append(right + times)
        table.add_row(kind, *cells)
    return table
