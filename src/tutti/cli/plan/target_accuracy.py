"""The output of `tutti plan --target-accuracy`: the time to an accuracy under each strategy."""

from math import inf, isnan

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tutti.cli.strategy_cell import StrategyCell
from tutti.cluster import format_time
from tutti.simulation.runs.time_to_accuracy import TimeToAccuracy


def table(reaches: list[TimeToAccuracy]) -> Table:
    """A row per strategy that was trained; the fastest to the target comes first."""
    rows = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    rows.add_column("")
    for heading in ("epochs", "best accuracy", "samples/s", "time"):
        rows.add_column(heading, justify="right", no_wrap=True)
    for result in reaches:
        mark = "" if result.prediction.exact else "~"
        rows.add_row(
            StrategyCell(f"{mark}{result.prediction.strategy}"),
            f"{result.epochs:g}" if result.epochs < inf else "-",
            "diverged" if isnan(result.accuracy) else f"{result.accuracy:.2%}",
            f"{result.prediction.samples_per_s:,.0f}",
            format_time(result.seconds) if result.seconds < inf else "never",
        )
    return rows


def recommendation(reaches: list[TimeToAccuracy], target: float, epochs: int) -> str:
    """The strategy that reaches the target first, and how long the best exact strategy takes."""
    first = reaches[0]
    # Sorted by time, so if the first does not get there, none does.
    if first.seconds == inf:
        return f"None reaches {target:.2%} within {epochs} epochs. Give more --epochs or a lower --target-accuracy."
    text = f"Use {first.prediction.strategy}: {target:.2%} in {format_time(first.seconds)}"
    exact = next((result for result in reaches if result.prediction.exact), None)
    if exact is None or exact is first:
        return f"{text}, by an exact strategy." if exact is first else f"{text}."
    if exact.seconds == inf:
        return f"{text}; {exact.prediction.strategy}, which is exact, does not reach it in {epochs} epochs."
    return f"{text}; {exact.prediction.strategy}, which is exact, takes {format_time(exact.seconds)}."
