"""`tutti bench plan`: the planner's predictions against measured step times."""

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table

from tutti.bench.models import MODEL_NAMES
from tutti.cli.bench.output import plain_table
from tutti.cli.bench.strategies import parse_strategies
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.options import JsonFile, NumRounds, split_list
from tutti.cli.strategy_cell import StrategyCell

if TYPE_CHECKING:
    from tutti.bench.plan import PlanComparison
    from tutti.bench.planner_accuracy import Allowed, PlannerChoice, PredictionCheck


def plan(
    models: Annotated[
        str, typer.Option(help=f"Comma-separated models to train: {', '.join(MODEL_NAMES)}.")
    ] = "mlp-1.9M,cifar-quick,char-gpt",
    rates: Annotated[
        str, typer.Option(help="Comma-separated rates of the lab's links, such as 100mbit,1gbit.")
    ] = "100mbit,1gbit,10gbit",
    texts: Annotated[
        str | None,
        typer.Option(
            "--strategies",
            help="Comma-separated strategies to predict and to time.",
            show_default="20 that the planner considers",
        ),
    ] = None,
    rounds: NumRounds = 5,
    json_file: JsonFile = None,
) -> None:
    """Compare the planner with reality: predicted and measured step times on a lab of four hosts.

    Links, codecs, a step of each model and the communication overhead are measured on the same hosts.

    The last table compares the planner's first choice with the fastest strategy.
    """
    from tutti.bench import plan as benchmark
    from tutti.bench.planner_accuracy import planner_choices

    check_writable(json_file)
    names = list(benchmark.STRATEGIES) if texts is None else parse_strategies(texts)
    cases = [(model, rate) for rate in split_list(rates) for model in split_list(models)]
    benchmark.check(split_list(models), split_list(rates), names)
    console = Console()
    comparisons: list[PlanComparison] = []
    with console.status("starting") as status:
        for number, (model, rate) in enumerate(cases):
            report = partial(_show, status, f"{number + 1} of {len(cases)}")
            comparisons.append(benchmark.compare(model, rate, names, rounds, report))
            console.print(_table(comparisons[-1].rows, benchmark.HOSTS))
            # The benchmark takes long, so what has been measured so far is written after each case.
            write_json(json_file, _as_dict(comparisons))
    rows = [row for comparison in comparisons for row in comparison.rows]
    choices = planner_choices(rows)
    console.print(_choices_table(choices))
    for line in _closing_lines(rows, choices):
        console.print(line, highlight=False)


def _as_dict(comparisons: "list[PlanComparison]") -> dict[str, Any]:
    """The contents of the JSON file: errors, rows, choices and what was measured."""
    from tutti.bench.planner_accuracy import error_summary, planner_choices

    rows = [row for comparison in comparisons for row in comparison.rows]
    median, worst = error_summary(rows)
    return {
        "median_error": median,
        "worst_error": worst,
        "rows": [row.as_dict() for row in rows],
        "choices": [choice.as_dict() for choice in planner_choices(rows)],
        "measured": [comparison.as_dict() for comparison in comparisons],
    }


def _show(status: Status, prefix: str, text: str) -> None:
    status.update(f"{prefix}: {text}")


def _table(rows: "list[PredictionCheck]", num_hosts: int) -> Table:
    table = plain_table(f"{rows[0].model}, {num_hosts} hosts, {rows[0].rate}: milliseconds per step")
    table.caption = "~: changes the result (compression, staleness, local steps)"
    table.add_column("")
    for heading in ("predicted", "measured", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        times = (f"{seconds * 1e3:.1f}" for seconds in (row.prediction.step_s, row.measured_s))
        table.add_row(StrategyCell(f"{'' if row.prediction.exact else '~'}{row.strategy}"), *times, f"{row.error:+.0%}")
    return table


def _choices_table(choices: "list[PlannerChoice]") -> Table:
    """What the planner would have chosen in each case, beside what was fastest there."""
    table = plain_table("The planner's first choice and the fastest strategy")
    table.caption = "×: measured step time of the choice, relative to the fastest"
    for heading in ("model", "rate", "allowed"):
        table.add_column(heading, no_wrap=True)
    for heading in ("chosen", "fastest"):
        table.add_column(heading)
    table.add_column("×", justify="right", no_wrap=True)
    for choice in choices:
        strategies = StrategyCell(choice.chosen), StrategyCell(choice.fastest)
        table.add_row(choice.model, choice.rate, choice.allowed, *strategies, f"{choice.times:.2f}")
    return table


def _closing_lines(rows: "list[PredictionCheck]", choices: "list[PlannerChoice]") -> list[str]:
    """How far predictions were off, and how often the first choice was right."""
    from tutti.bench.planner_accuracy import NEAR_BEST, error_summary, num_right

    median, worst = error_summary(rows)
    lines = [f"error of predicted step times: median {median:.1%}, worst {worst:.1%}, over {len(rows)} steps"]
    kinds: dict[Allowed, str] = {"exact": "among exact strategies", "lossy too": "among all strategies"}
    for allowed, words in kinds.items():
        right, total = num_right(choices, allowed)
        if total:
            lines.append(
                f"{words}, the first choice is within {NEAR_BEST - 1:.0%} of the fastest in {right} of {total} cases"
            )
    return lines
