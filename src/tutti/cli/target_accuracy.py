"""What `tutti plan --target-accuracy` shows."""

from math import inf, isnan

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tutti.cluster import format_time
from tutti.simulation.runs.time_to_accuracy import TimeToAccuracy


def table_of(reaches: list[TimeToAccuracy], target: float) -> Table:
    """Every strategy that was trained, the soonest first."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=f"until {target:.2%}", title_justify="left")
    table.add_column("", overflow="fold")
    for heading in ("epochs", "best", "samples/s", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in reaches:
        mark = "" if each.prediction.exact else "~"
        table.add_row(
            f"{mark}{each.prediction.strategy}",
            f"{each.epochs:g}" if each.epochs < inf else "-",
            "diverged" if isnan(each.accuracy) else f"{each.accuracy:.2%}",
            f"{each.prediction.samples_per_s:,.0f}",
            format_time(each.seconds) if each.seconds < inf else "never",
        )
    return table


def in_words(reaches: list[TimeToAccuracy], target: float, epochs: int) -> str:
    """Which to use to get there."""
    first = reaches[0]
    if first.seconds == inf:
        return f"None reaches {target:.2%} within {epochs} epochs: give more --epochs, or ask for less."
    said = f"Use {first.prediction.strategy}: {target:.2%} in {format_time(first.seconds)}"
    exact = next((each for each in reaches if each.prediction.exact), None)
    if exact is None or exact is first:
        return f"{said}, by an exact strategy." if exact is first else f"{said}."
    if exact.seconds == inf:
        return f"{said}; {exact.prediction.strategy}, which is exact, does not get there in {epochs} epochs."
    return f"{said}; {exact.prediction.strategy}, which is exact, takes {format_time(exact.seconds)}."
