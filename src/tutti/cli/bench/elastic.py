"""`tutti bench elastic`: what does the loss of a worker cost, and does training end where it would have ended?"""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from tutti.bench.models import MODEL_NAMES, check_model_names
from tutti.cli.bench.output import format_ms, plain_table
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.options import JsonFile

if TYPE_CHECKING:
    from tutti.bench.elastic.kills import LossOutcome


def elastic(
    kills: Annotated[int, typer.Option(help="Number of kills, divided between the strategies.", min=1)] = 100,
    workers: Annotated[int, typer.Option("--workers", "-n", help="Number of workers.", min=3)] = 4,
    model: Annotated[
        str, typer.Option(help=f"Model for the cost without losses: {', '.join(MODEL_NAMES)}.")
    ] = "mlp-0.1M",
    seed: Annotated[int, typer.Option(help="Seed of the moments and ranks of kills.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", metavar="", help="Four kills under two strategies.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Kill workers of elastic runs at random moments, and compare the end with that of an undisturbed run.

    Example: tutti bench elastic --kills 40 --workers 3
    """
    from tutti.bench.elastic.kills import QUICK, SUBJECTS, losses

    check_writable(json_file)
    check_model_names([model])
    console = Console()
    with console.status("killing workers") as status:

        def done(outcome: "LossOutcome") -> None:
            status.update(f"killing workers under {outcome.strategy}: {outcome.kills} so far")

        outcomes = losses(4 if quick else kills, seed, QUICK if quick else SUBJECTS, workers=workers, done=done)
        status.update("timing steps without losses")
        cost = _cost(model)
    table = plain_table("Losses: milliseconds from the kill to the next step of all survivors; and the end of the runs")
    for heading in (
        "strategy",
        "transport",
        "kills",
        "runs",
        "median ms",
        "slowest ms",
        "samples",
        "results",
        "differ by",
    ):
        table.add_column(heading, justify="left" if heading in ("strategy", "transport") else "right")
    for each in outcomes:
        times = format_ms(each.median_s), format_ms(each.slowest_s)
        counts = map(str, (each.misused, each.different))
        row = (str(each.kills), str(each.runs), *times, *counts, f"{each.largest_difference:.0e}")
        table.add_row(each.strategy, each.transport, *row)
    console.print(table)
    console.print("samples: not used exactly once; results: runs that did not end as they should", highlight=False)
    for each in outcomes:
        for problem in each.problems:
            console.print(f"{each.strategy}: {problem}", markup=False, highlight=False)
    console.print(
        f"Without losses, {cost['model']}, 2 workers: {1e6 * cost['ready_s']:.1f} µs of a step of "
        f"{format_ms(cost['step_s'])} ms, {100 * cost['share']:.2f} %",
        highlight=False,
    )
    write_json(json_file, [*map(asdict, outcomes), cost])


def _cost(model: str) -> dict[str, Any]:
    from tutti.bench.elastic.cost import measure
    from tutti.launch.control_settings import ELASTIC
    from tutti.launch.local import supervise

    found = supervise(measure, (model,), 2, {ELASTIC: "2:2"}).run()[0]
    return {**asdict(found), "share": found.share}
