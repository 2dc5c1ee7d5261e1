"""`tutti bench rates`: whether recipes reach their target with every strategy at `--lr auto`."""

from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from tutti.cli.bench.output import plain_table
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.options import DataFolder, JsonFile, parse_worker_counts, refuse_given, split_list
from tutti.cli.progress import format_rate
from tutti.cli.strategy_cell import StrategyCell
from tutti.errors import ConfigError
from tutti.recipes import RECIPES

if TYPE_CHECKING:
    from tutti.bench.rates import TargetRun

_QUICK_STRATEGIES = "ps:ssp=3,servers=1;bmuf:every=16;gossip"


def rates(
    context: typer.Context,
    recipes: Annotated[str, typer.Option(help=f"Comma-separated recipes to train: {', '.join(RECIPES)}.")] = "digits",
    strategies: Annotated[
        str | None,
        typer.Option(help="Strategies, separated by semicolons. Default: every family with its default settings."),
    ] = None,
    workers: Annotated[str, typer.Option(help="Comma-separated numbers of workers.")] = "2,8",
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs, each with another seed.")] = 3,
    data: DataFolder = None,
    quick: Annotated[
        bool, typer.Option("--quick", metavar="", help="Train digits with three strategies, 2 workers and one seed.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Train recipes with every strategy at --lr auto, in virtual time, and report which reach their target accuracy.

    A run ends with the first epoch that reaches the target.

    Example: tutti bench rates --recipes digits,mnist-mlp --workers 2,8
    """
    from tutti.bench.rates import CLUSTER, measured_strategies, target_runs
    from tutti.strategies import parse

    if quick:
        refuse_given(context, ("recipes", "strategies", "workers", "seeds"), "changes nothing with --quick.")
        strategies, workers, seeds = _QUICK_STRATEGIES, "2", 1
    check_writable(json_file)
    names = split_list(recipes)
    if not names:
        raise ConfigError("--recipes needs one or more.")
    for name in names:
        RECIPES.find(name)
    texts = measured_strategies()
    if strategies is not None:
        texts = [str(parse(text.strip())) for text in strategies.split(";") if text.strip()]
    counts = parse_worker_counts(workers, least=2, example="2,8")
    console, runs = Console(), []
    with console.status("training") as status:
        for run in target_runs(names, texts, counts, seeds, str(data) if data else None):
            runs.append(run)
            status.update(f"{run.recipe}, {run.strategy}, {run.workers} workers, seed {run.seed}: {_accuracy(run)}")
            # After every run, because all of them may take hours.
            write_json(json_file, {"cluster": CLUSTER, "runs": [run.as_dict() for run in runs]})
    console.print(_table(runs, counts, CLUSTER))


def _table(runs: "list[TargetRun]", counts: list[int], cluster: str) -> Table:
    table = plain_table(f"Test accuracy at --lr auto, and the epoch that reached it, simulated on {cluster}")
    table.caption = (
        "the slowest seed; ✗ seeds below the recipe's target; rate: learning rate (and momentum) with the most "
        "workers, after a share of the training with synchronous steps at the recipe's rate"
    )
    table.add_column("recipe (target)")
    table.add_column("strategy")
    for count in counts:
        table.add_column(f"{count} workers", justify="right", no_wrap=True)
    table.add_column("rate", justify="right")
    for (recipe, strategy), group in groupby(runs, key=lambda run: (run.recipe, run.strategy)):
        of_row = list(group)
        cells = [_cell([run for run in of_row if run.workers == count]) for count in counts]
        last = of_row[-1]
        start = f" after {last.synchronous_share:.0%}" if last.synchronous_share else ""
        rate = format_rate(last.lr, last.momentum) + start
        table.add_row(f"{recipe} ({last.target:.0%})", StrategyCell(strategy), *cells, rate)
    return table


def _cell(runs: "list[TargetRun]") -> str:
    """The accuracy of the slowest run; with a cross and the number of runs below the target, if there are any."""
    missed = sum(not run.reached for run in runs)
    slowest = min(runs, key=lambda run: (run.reached, -run.epochs, run.accuracy))
    return _accuracy(slowest) + (f" ✗{missed}" if missed else "")


def _accuracy(run: "TargetRun") -> str:
    return f"{run.accuracy:.1%}, epoch {run.epochs:g}"
