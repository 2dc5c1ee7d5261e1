"""`tutti bench`: Tutti beside its peers, on this machine."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tutti.bench import allreduce as allreduce_bench
from tutti.bench import overhead as overhead_bench
from tutti.bench import step as step_bench
from tutti.bench import under_mpi
from tutti.cli.json_file import check_writable, write_json
from tutti.errors import ConfigError, UnknownName

app = typer.Typer(help="Time Tutti beside DDP, Gloo and Open MPI on this machine.", no_args_is_help=True)

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")]
Workers = Annotated[str, typer.Option("--workers", "-n", help="Numbers of workers, such as 2,4.")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds of every way, in turn; the median counts.")]


@app.command("step")
def step(
    cases: Annotated[str, typer.Option(help=f"Some of {', '.join(step_bench.CASES)}.")] = ",".join(step_bench.CASES),
    workers: Workers = "2,4",
    rounds: Rounds = 15,
    json_file: JsonFile = None,
) -> None:
    """Training steps: solo, DDP, Tutti and a flat Open MPI all-reduce, interleaved."""
    check_writable(json_file)
    names = cases.split(",")
    for name in names:
        if name not in step_bench.CASES:
            raise UnknownName("benchmark case", name, step_bench.CASES)
    console = Console()
    rows: list[dict[str, Any]] = []
    for number in _numbers(workers):
        rows += _with_progress(f"step, {number} workers", step_bench.measure, names, rounds, workers=number)
    console.print(_step_table(rows))
    _note_mpi(console)
    write_json(json_file, rows)


@app.command("allreduce")
def allreduce(workers: Workers = "2", rounds: Rounds = 15, json_file: JsonFile = None) -> None:
    """All-reduce alone, 1 KiB to 64 MiB: shared memory, Gloo and Open MPI, interleaved."""
    check_writable(json_file)
    console = Console()
    rows: list[dict[str, Any]] = []
    for number in _numbers(workers):
        rows += _with_progress(f"all-reduce, {number} workers", allreduce_bench.measure, rounds, workers=number)
    console.print(_allreduce_table(rows))
    _note_mpi(console)
    write_json(json_file, rows)


@app.command("overhead")
def overhead(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    rounds: Rounds = 15,
    compiled: Annotated[bool, typer.Option(help="Also time models under torch.compile.")] = True,
    json_file: JsonFile = None,
) -> None:
    """One rank under Tutti beside the bare step: what it costs a run that does not need it."""
    check_writable(json_file)
    if device not in overhead_bench.STEPS_PER_ROUND:
        raise ConfigError(f"--device takes {' or '.join(overhead_bench.STEPS_PER_ROUND)}, got '{device}'.")
    console = Console()
    with console.status(f"timing {', '.join(overhead_bench.CASES)} on {device}"):
        rows = overhead_bench.measure(device, rounds, compiled)
    table = Table(title=f"median milliseconds a step on {device}, one rank")
    for heading in ("model", "precision", "", "bare", "Tutti", "ratio"):
        table.add_column(heading)
    for row in rows:
        how = "compiled" if row["compiled"] else "plain"
        times = _ms(row["seconds"]["bare"]), _ms(row["seconds"]["tutti"])
        table.add_row(row["case"], row["precision"], how, *times, f"{row['ratio']:.3f}")
    console.print(table)
    write_json(json_file, rows)


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 2:
        raise ConfigError(f"--workers takes numbers of 2 or more with commas between, such as 2,4; got '{text}'.")
    return numbers


def _with_progress(label: str, function: Any, *args: Any, workers: int) -> list[dict[str, Any]]:
    with Progress(transient=True) as progress:
        bar = progress.add_task(label, total=None)

        def show(rank: int, values: dict[str, Any]) -> None:
            if rank == 0:
                progress.update(bar, completed=values["done"], total=values["total"])

        return under_mpi.run(function, *args, workers=workers, watch=show)


def _step_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="median ms a step of n workers; ×: how many times faster Tutti is")
    for heading in ("model", "n", "solo", "DDP", "MPI", "Tutti", "× DDP", "× MPI", "eff."):
        table.add_column(heading, justify="left" if heading == "model" else "right", no_wrap=True)
    for row in rows:
        times = [_ms(row["seconds"].get(way)) for way in ("solo", "ddp", "mpi", "tutti")]
        ratios = [_times(row["times_ddp"]), _times(row["times_mpi"]), f"{row['efficiency']:.0%}"]
        table.add_row(row["case"], str(row["workers"]), *times, *ratios)
    return table


def _allreduce_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="median µs an all-reduce of n workers; ×: how many times faster Tutti is")
    for heading in ("size", "n", "Gloo", "MPI", "Tutti", "copied in", "× Gloo", "× MPI"):
        table.add_column(heading, justify="right")
    for row in rows:
        times = [_us(row["seconds"].get(way)) for way in ("gloo", "mpi", "tutti", "tutti-copied")]
        ratios = [_times(row["times_gloo"]), _times(row["times_mpi"])]
        table.add_row(_size(row["num_bytes"]), str(row["workers"]), *times, *ratios)
    return table


def _note_mpi(console: Console) -> None:
    if not under_mpi.available():
        console.print("Open MPI was not timed: pip install 'tutti[mpi]' to have it.")


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.2f}"


def _us(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e6:,.1f}"


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}×"


def _size(num_bytes: int) -> str:
    return f"{num_bytes // 1024} KiB" if num_bytes < 2**20 else f"{num_bytes // 2**20} MiB"
