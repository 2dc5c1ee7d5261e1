"""`tutti bench faults`: is the right rank named when something goes wrong, and how soon?"""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from tutti.cli.json_file import check_writable, write_json
from tutti.cli.options import JsonFile, split_list
from tutti.errors import ConfigError

if TYPE_CHECKING:
    from tutti.bench.faults import Outcome


def faults(
    kinds: Annotated[str, typer.Option(help="Comma-separated kinds of faults.", show_default="all")] = "all",
    repeats: Annotated[int, typer.Option(help="Faults of each kind under each strategy.", min=1)] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the ranks and steps at which faults happen.")] = 0,
    control_steps: Annotated[
        int, typer.Option(help="Undisturbed steps of each strategy, in which every report is a false alarm.", min=0)
    ] = 2000,
    quick: Annotated[
        bool, typer.Option("--quick", metavar="", help="Two kinds of faults under one strategy, once each.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Inject faults into one rank of training jobs of 3 workers, and check who is named, why, and how soon.

    Example: tutti bench faults --kinds killed,stopped --repeats 5
    """
    from tutti.bench.faults import KINDS, STRATEGIES, cases, measure, summary, undisturbed

    check_writable(json_file)
    chosen = list(KINDS) if kinds == "all" else split_list(kinds)
    if unknown := [kind for kind in chosen if kind not in KINDS]:
        raise ConfigError(f"no kind of fault is called '{unknown[0]}'. Known: {', '.join(KINDS)}.")
    strategies = list(STRATEGIES)
    if quick:
        chosen, strategies, repeats, control_steps = ["killed", "slow loader"], ["native"], 1, min(control_steps, 50)
    console = Console()
    planned, number = cases(chosen, strategies, repeats, seed), 0
    with console.status("injecting faults") as status:

        def done(outcome: "Outcome") -> None:
            nonlocal number
            number += 1
            status.update(f"injecting faults: {number} of {len(planned)}, last '{outcome.kind}'")

        outcomes = measure(planned, done)
        status.update("training undisturbed")
        controls = [undisturbed(strategy, control_steps) for strategy in strategies if control_steps]
    console.print(_table(outcomes, chosen, strategies))
    total = summary(outcomes)
    alarms = sum(control.false_alarms for control in controls)
    console.print(
        f"{total['faults']} faults: right rank in {100 * total['rank_right']:.0f} %, right cause in "
        f"{100 * total['cause_right']:.0f} %, ended as promised in {100 * total['ended_right']:.0f} %; "
        f"{total['left_behind']} processes left behind; {alarms} false alarms in {control_steps * len(controls)} steps",
        highlight=False,
    )
    for outcome in outcomes:
        for line in filter(None, outcome.said):
            console.print(f"{outcome.kind}, {outcome.strategy}, rank {outcome.victim}: {line}", markup=False)
    write_json(json_file, [*map(asdict, outcomes), *map(asdict, controls)])


def _table(outcomes: "list[Outcome]", kinds: list[str], strategies: list[str]) -> Table:
    from tutti.bench.faults import median_s

    table = Table(title="Faults with right rank / right cause / injected, and median milliseconds until they are known")
    for heading in ("fault", *strategies):
        table.add_column(heading, justify="left" if heading == "fault" else "right", no_wrap=True)
    for kind in kinds:
        cells = []
        for strategy in strategies:
            found = [each for each in outcomes if (each.kind, each.strategy) == (kind, strategy)]
            right = f"{sum(each.rank_right for each in found)}/{sum(each.cause_right for each in found)}/{len(found)}"
            seconds = median_s(found)
            cells.append(right if seconds is None else f"{right} {1000 * seconds:.0f}")
        table.add_row(kind, *cells)
    return table
