"""`tutti bench control`: the cost of heartbeats and phases when nothing fails."""

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tutti.bench.models import MODEL_NAMES, check_model_names
from tutti.cli.bench.output import format_ms
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.lab_option import check_workers_or_lab, launch_arguments, open_lab
from tutti.cli.options import JsonFile, NumRounds


def control(
    model: Annotated[str, typer.Option(help=f"Model to train: {', '.join(MODEL_NAMES)}.")] = "mlp-0.1M",
    workers: Annotated[
        int | None, typer.Option("--workers", "-n", min=2, help="Number of workers.", show_default="2")
    ] = None,
    lab: Annotated[
        str | None, typer.Option(metavar="SPEC", help="Run on emulated hosts, such as hosts=2,rate=1gbit. Needs root.")
    ] = None,
    rounds: NumRounds = 101,
    json_file: JsonFile = None,
) -> None:
    """Time training steps with and without heartbeats and phases, in turn, and their cost alone."""
    from tutti.bench.control import measure
    from tutti.launch import launch

    check_writable(json_file)
    check_model_names([model])
    check_workers_or_lab(workers, lab)
    with open_lab(lab) as opened, Progress(transient=True) as progress:
        bar = progress.add_task("training steps", total=None)

        def show(rank: int, values: dict[str, Any]) -> None:
            if rank == 0:
                progress.update(bar, completed=values["done"], total=values["total"])

        rows = launch(measure, model, rounds, watch=show, **launch_arguments(workers or 2, opened))[0]
    table = Table(
        title="Median milliseconds per step; ratio: median over rounds, with heartbeats and phases to without"
    )
    for heading in (
        "model",
        "workers",
        "without",
        "with",
        "ratio",
        "quartiles apart",
        "phase, µs",
        "beat, µs",
        "share",
    ):
        table.add_column(heading)
    for row in rows:
        times = [format_ms(row["seconds"][name]) for name in ("without", "with")]
        own = [f"{1e6 * row[name]:.2f}" for name in ("phase_s", "beat_s")]
        ratios = [f"{row['ratio']:.4f}", f"{row['spread']:.4f}"]
        table.add_row(row["model"], str(row["workers"]), *times, *ratios, *own, f"{100 * row['share']:.3f} %")
    Console().print(table)
    write_json(json_file, rows)
