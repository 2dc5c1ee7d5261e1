"""A progress bar for benchmarks that run under mpirun."""

from collections.abc import Callable
from typing import Any

from rich.progress import Progress


def run_with_progress(label: str, function: Callable[..., Any], *args: Any, workers: int) -> list[dict[str, Any]]:
    """Run `function(*args)` on `workers` ranks, under mpirun if there is one, and return rank 0's result."""
    from tutti.bench import under_mpi

    with Progress(transient=True) as progress:
        bar = progress.add_task(label, total=None)

        def show(rank: int, values: dict[str, Any]) -> None:
            if rank == 0:
                progress.update(bar, completed=values["done"], total=values["total"])

        return under_mpi.run(function, *args, workers=workers, watch=show)
