"""`tutti simulate RECIPE --mtbf`: the share of useful work under failures, by strategy and number of workers.

This module imports torch; the command imports it when it runs.
"""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tutti.cli.bench.output import plain_table
from tutti.cli.bench.strategies import split_strategies
from tutti.cli.options import parse_worker_counts
from tutti.cli.strategy_cell import StrategyCell
from tutti.cluster import Cluster, format_time
from tutti.errors import ConfigError
from tutti.plan.goodput import RESTART, FailureRates, Goodput, check_elastic, goodput, restart_goodput
from tutti.recipes import recipe
from tutti.report.goodput import plot_goodput
from tutti.report.plots import check_plot
from tutti.simulation.runs.modelled_profile import modelled_profile
from tutti.strategies import Strategy, parse

_WORKERS = "8,64,256,1000"
_STRATEGIES = (
    "ring", "native", "poseidon", "onebit", "averaging:every=16", "bmuf:every=16", "diloco", "ps:bsp", "ps:ssp=3",
    "ps:async", "peers", "gossip",
)  # fmt: skip
"""One or two of each family, where none are given."""


def goodput_curves(
    name: str, workers: str | None, strategies: str | None, cluster: Cluster, rates: tuple[str, str], plot: Path | None
) -> dict[str, Any]:
    """Predict the goodput of a recipe, print it, and return it for `--json`.

    Args:
        name: of the recipe.
        workers: numbers of workers with commas between.
        strategies: with commas between; "restart" is the comparison with restarts from checkpoints.
        rates: the texts of mtbf and repair.
        plot: where to draw the curves.
    """
    failures = FailureRates.parse(*rates)
    check_plot(plot)
    numbers = parse_worker_counts(workers or _WORKERS, 2, _WORKERS)
    texts = split_strategies(strategies) if strategies is not None else list(_STRATEGIES)
    chosen = [parse(text) for text in texts if text != RESTART]
    for strategy in chosen:
        check_elastic(strategy)
    if not chosen:
        raise ConfigError("give a strategy to compare with 'restart', such as --strategy ring,restart.")
    for number in numbers:
        cluster.place(number)  # Refuses more ranks than the hosts have room for.
    made = recipe(name)
    profile = modelled_profile(made, made.batch_size, cluster)
    rows = {number: _row(chosen, number, profile, cluster, failures) for number in numbers}
    console = Console()
    title = f"{name}, {made.batch_size} samples per worker, {cluster.name}; {failures}"
    console.print(_table(title, rows))
    if plot is not None:
        curves: dict[str, list[tuple[int, float]]] = {}
        for number, row in rows.items():
            for each in row:
                curves.setdefault(each.strategy, []).append((number, each.share))
        plot_goodput(curves, title, plot)
        console.print(f"figure written to {plot}")
    return {
        "recipe": name,
        "cluster": cluster.to_toml(),
        "mtbf_s": failures.mtbf_s,
        "repair_s": failures.repair_s,
        "goodput": [each.as_dict() for row in rows.values() for each in row],
    }


def _row(
    strategies: list[Strategy], workers: int, profile: Any, cluster: Cluster, failures: FailureRates
) -> list[Goodput]:
    """Return the goodput of each strategy on so many workers, and that of restarts under the first one."""
    found = [goodput(strategy, profile, workers, cluster, failures) for strategy in strategies]
    return [*found, restart_goodput(strategies[0], profile, workers, cluster, failures)]


def _table(title: str, rows: dict[int, list[Goodput]]) -> Table:
    """The share of useful work by strategy and number of workers, and what one loss costs."""
    table = plain_table(title)
    table.caption = (
        "share of useful work, relative to all workers without failures; one loss: void work and pause with the most "
        f"workers; {RESTART}: all workers are started again from the last checkpoint at every change"
    )
    table.add_column("strategy")
    for number in rows:
        table.add_column(f"{number:,} workers", justify="right", no_wrap=True)
    table.add_column("one loss", justify="right", no_wrap=True)
    for curve in zip(*rows.values(), strict=True):
        shares = (f"{each.share:.1%}" for each in curve)
        table.add_row(StrategyCell(curve[0].strategy), *shares, format_time(curve[-1].loss_s))
    return table
