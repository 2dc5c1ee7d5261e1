"""Tables, numbers and progress lines that the benchmark commands share."""

from collections.abc import Callable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.status import Status
from rich.table import Table

Watch = Callable[[int, dict[str, Any]], None]


def plain_table(title: str) -> Table:
    """A table without vertical lines."""
    return Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))


def format_ms(seconds: float | None) -> str:
    """Milliseconds with two decimals; a dash where nothing was measured."""
    return "–" if seconds is None else f"{seconds * 1e3:.2f}"


def format_us(seconds: float | None) -> str:
    """Microseconds with one decimal; a dash where nothing was measured."""
    return "–" if seconds is None else f"{seconds * 1e6:,.1f}"


def format_ratio(ratio: float | None) -> str:
    """A ratio such as 1.85×; a dash where there is none."""
    return "–" if ratio is None else f"{ratio:.2f}×"


def show_activity(status: Status, prefix: str = "") -> Watch:
    """A watcher for `tutti.launch` that shows what rank 0 reports it is doing."""

    def show(rank: int, values: dict[str, Any]) -> None:
        if rank == 0 and "doing" in values:
            status.update(f"{prefix}{values['doing']}")

    return show


def note_missing_mpi(console: Console) -> None:
    """Tell the user how to have Open MPI timed too, if it is not installed."""
    from tutti.bench import under_mpi

    if not under_mpi.available():
        console.print("Open MPI was not timed. Install it with: pip install 'tutti-train\\[mpi]'")
