"""`tutti bench plan`: is the planner right?"""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.status import Status
from rich.table import Table

from tutti.bench import plan as bench
from tutti.bench.planner_accuracy import (
    NEAR_BEST,
    Allowed,
    PlannerChoice,
    PredictionCheck,
    error_summary,
    num_right,
    planner_choices,
)
from tutti.bench.step import CASES
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.strategies import strategies_to_time


def plan(
    models: Annotated[str, typer.Option(help=f"Some of {', '.join(CASES)}.")] = ",".join(bench.MODELS),
    rates: Annotated[str, typer.Option(help="Of the lab's links.")] = ",".join(bench.RATES),
    ways: Annotated[
        str, typer.Option("--strategies", help="What to predict and to time, with commas between.")
    ] = ",".join(bench.STRATEGIES),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of every way, in turn; the median counts.")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")] = None,
) -> None:
    """The planner against reality: steps in a lab of four hosts beside what it predicts, and what it would choose.

    Links, codecs, a step of each model and what exchanging takes beyond formulas are measured on the same hosts.
    """
    check_writable(json_file)
    texts = strategies_to_time(ways)
    cases = [(model, rate) for rate in _parts(rates) for model in _parts(models)]
    bench.check(_parts(models), _parts(rates), texts)
    console = Console()
    outcomes: list[bench.PlanComparison] = []
    with console.status("starting") as status:
        for number, (model, rate) in enumerate(cases):
            say = partial(_say, status, f"{number + 1} of {len(cases)}")
            outcomes.append(bench.compare(model, rate, texts, rounds, say))
            console.print(_table(outcomes[-1].rows))
            write_json(json_file, _as_dict(outcomes))  # It takes long: what there is is kept.
    rows = [row for outcome in outcomes for row in outcome.rows]
    choices = planner_choices(rows)
    console.print(_choices(choices))
    for line in _verdict(rows, choices):
        console.print(line, highlight=False)


def _as_dict(outcomes: list[bench.PlanComparison]) -> dict[str, Any]:
    rows = [row for outcome in outcomes for row in outcome.rows]
    middle, worst = error_summary(rows)
    return {
        "median_error": middle,
        "worst_error": worst,
        "rows": [row.as_dict() for row in rows],
        "choices": [choice.as_dict() for choice in planner_choices(rows)],
        "measured": [outcome.as_dict() for outcome in outcomes],
    }


def _say(status: Status, which: str, text: str) -> None:
    status.update(f"{which}: {text}")


def _parts(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",")))


def _table(rows: list[PredictionCheck]) -> Table:
    title = f"{rows[0].model}, {bench.HOSTS} hosts, {rows[0].rate}: ms a step"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", overflow="fold")
    for heading in ("predicted", "measured", "off by"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        times = (f"{seconds * 1e3:.1f}" for seconds in (row.prediction.step_s, row.measured_s))
        table.add_row(f"{'' if row.prediction.exact else '~'}{row.strategy}", *times, f"{row.error:+.0%}")
    return table


def _choices(choices: list[PlannerChoice]) -> Table:
    table = Table(title="the planner's first choice, and what was fastest", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.caption = "×: times as long as the fastest, as measured"
    for heading in ("model", "rate", "allowed"):
        table.add_column(heading, no_wrap=True)
    for heading in ("chosen", "fastest"):
        table.add_column(heading, overflow="fold")
    table.add_column("×", justify="right", no_wrap=True)
    for each in choices:
        table.add_row(each.model, each.rate, each.allowed, each.chosen, each.fastest, f"{each.times:.2f}")
    return table


_WORDS: dict[Allowed, str] = {"exact": "among exact ones", "lossy too": "with lossy ones allowed"}


def _verdict(rows: list[PredictionCheck], choices: list[PlannerChoice]) -> list[str]:
    middle, worst = error_summary(rows)
    lines = [f"step times off by {middle:.1%} (median), {worst:.1%} (worst) of {len(rows)}"]
    for allowed, words in _WORDS.items():
        right, total = num_right(choices, allowed)
        if total:
            lines.append(
                f"{words}, the first choice is within {NEAR_BEST - 1:.0%} of the fastest in {right} of {total}"
            )
    return lines
