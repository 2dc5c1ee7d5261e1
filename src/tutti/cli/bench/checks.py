"""`tutti bench checks`: the cost of the checks that run while training."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tutti.bench.models import MODEL_NAMES, check_model_names
from tutti.cli.bench.mpi_progress import run_with_progress
from tutti.cli.bench.output import format_ms
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.options import JsonFile, NumRounds


def checks(
    model: Annotated[str, typer.Option(help=f"Model to train: {', '.join(MODEL_NAMES)}.")] = "mlp-0.1M",
    workers: Annotated[int, typer.Option("--workers", "-n", min=2, help="Number of workers.")] = 2,
    rounds: NumRounds = 51,
    json_file: JsonFile = None,
) -> None:
    """Time training steps with and without the checks that run while training, in turn, and the checks alone."""
    from tutti.bench.checks import measure

    check_writable(json_file)
    check_model_names([model])
    rows = run_with_progress(f"training steps of {workers} workers", measure, model, rounds, workers=workers)
    table = Table(title="Median milliseconds per step; ratio: median over rounds, with checks to without")
    for heading in ("model", "workers", "without", "with", "ratio", "checks alone, µs"):
        table.add_column(heading)
    for row in rows:
        times = [format_ms(row["seconds"][name]) for name in ("without", "with")]
        table.add_row(row["model"], str(row["workers"]), *times, f"{row['ratio']:.4f}", f"{1e6 * row['checks_s']:.1f}")
    Console().print(table)
    write_json(json_file, rows)
