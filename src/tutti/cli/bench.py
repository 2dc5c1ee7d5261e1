"""`tutti bench`: Tutti beside its peers, on this machine."""

import statistics
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tutti.bench import allreduce as allreduce_bench
from tutti.bench import codecs as codecs_bench
from tutti.bench import collectives as collectives_bench
from tutti.bench import fidelity as fidelity_bench
from tutti.bench import overhead as overhead_bench
from tutti.bench import step as step_bench
from tutti.bench import under_mpi
from tutti.cli.backend import backend
from tutti.cli.bench_auto import auto
from tutti.cli.bench_meshes import meshes
from tutti.cli.bench_pipeline import pipeline
from tutti.cli.bench_plan import plan
from tutti.cli.bench_startup import startup
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.overlap import overlap
from tutti.cli.place import check_one_place, described, lab_if_any, numbers_of_workers
from tutti.cli.strategies import strategies
from tutti.cli.worth import worth
from tutti.cluster import Link, format_size, parse_size
from tutti.errors import ConfigError, UnknownName
from tutti.report.plots import check_plot, label, plot_collectives

app = typer.Typer(
    help="Time Tutti and its parts on this machine, beside DDP, Gloo, Open MPI and memory.", no_args_is_help=True
)

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")]
Workers = Annotated[str, typer.Option("--workers", "-n", help="Numbers of workers, such as 2,4.")]
LabSpecText = Annotated[
    str | None, typer.Option("--lab", metavar="SPEC", help="On hosts made for it, such as hosts=4,rate=100mbit.")
]
_SIZES = "1KiB,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB"
Rounds = Annotated[int, typer.Option(min=1, help="Rounds of every way, in turn; the median counts.")]


app.command("worth")(worth)
app.command("strategies")(strategies)
app.command("plan")(plan)
app.command("meshes")(meshes)
app.command("auto")(auto)
app.command("overlap")(overlap)
app.command("backend")(backend)
app.command("pipeline")(pipeline)
app.command("startup")(startup)


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
    for number in numbers_of_workers(workers, 2, "2,4"):
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
    for number in numbers_of_workers(workers, 2, "2,4"):
        rows += _with_progress(f"all-reduce, {number} workers", allreduce_bench.measure, rounds, workers=number)
    console.print(_allreduce_table(rows))
    _note_mpi(console)
    write_json(json_file, rows)


@app.command("collectives")
def collectives(
    lab: LabSpecText = None,
    workers: Annotated[
        int | None, typer.Option("--workers", "-n", min=2, help="Processes on this machine; 4 by default.")
    ] = None,
    sizes: Annotated[str, typer.Option(help="Bytes of a message, such as 1KiB,4MiB; the smallest is 4.")] = _SIZES,
    rounds: Rounds = 9,
    plot: Annotated[Path | None, typer.Option(help="Draw it here: a file that ends in .png or .svg.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Every all-reduce, measured and predicted, beside Gloo's and Open MPI's own: on loopback or in a lab."""
    check_writable(json_file)
    check_plot(plot)
    check_one_place(workers, lab)
    workers = workers or 4
    numbers = [parse_size(text) for text in sizes.split(",")]
    if min(numbers) < 4:
        raise ConfigError(f"--sizes takes 4 bytes or more, got '{sizes}'.")
    console = Console()
    with lab_if_any(lab) as hosts:
        where = described(workers, hosts)
        with console.status(f"timing {len(numbers)} sizes, {where}"):
            chosen = {"workers": workers} if hosts is None else {"lab": hosts}
            result = under_mpi.run(collectives_bench.measure, numbers, rounds, **chosen)
    link = Link(result["link"]["bits_per_s"], result["link"]["latency_s"])
    console.print(_collectives_table(result))
    console.print(f"{where}; measured link: {link}")
    console.print(f"cheapest: {_said(result['rows'])}")
    _note_mpi(console)
    write_json(json_file, {"lab": lab, **result})
    if plot is not None:
        plot_collectives(result, f"all-reduce, {where}", plot)
        console.print(f"drawn in {plot}")


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


@app.command("codecs")
def codecs(
    size: Annotated[str, typer.Option(help="Of the tensor in float32, such as 16MiB.")] = "16MiB",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    rounds: Rounds = 15,
    json_file: JsonFile = None,
) -> None:
    """Codecs alone, bare and with error feedback, beside a copy of the same tensor: one core, or one GPU."""
    check_writable(json_file)
    console = Console()
    with console.status("starting") as status:
        result = codecs_bench.measure(device, parse_size(size), rounds, status.update)
    console.print(_codecs_table(result["rows"]))
    copied = result["num_bytes"] / result["copy_s"] / 1e9
    where = "one thread of the CPU" if device == "cpu" else torch.cuda.get_device_name()
    console.print(f"{format_size(result['num_bytes'])} of float32 on {where}; copy_ of it: {copied:.1f} GB/s")
    write_json(json_file, result)


@app.command("fidelity")
def fidelity(
    models: Annotated[str, typer.Option(help="Recipes, with commas between.")] = ",".join(fidelity_bench.MODELS),
    strategies: Annotated[str, typer.Option(help=f"Some of {', '.join(fidelity_bench.STRATEGIES)}.")] = ",".join(
        fidelity_bench.STRATEGIES
    ),
    rates: Annotated[str, typer.Option(help="Of the lab's links.")] = ",".join(fidelity_bench.RATES),
    steps: Annotated[int, typer.Option(min=1, help="Of every job; the median counts.")] = 30,
    json_file: JsonFile = None,
) -> None:
    """The simulator against reality: the same jobs in a lab of four hosts and in virtual time, from one measurement."""
    check_writable(json_file)
    chosen = fidelity_bench.chosen(models.split(","), strategies.split(","), rates.split(","))
    console = Console()
    with console.status("starting") as status:
        rows = fidelity_bench.compare(chosen, steps, status.update)
    console.print(_fidelity_table(rows))
    errors = [abs(row.error) for row in rows]
    same = sum(row.same_bits for row in rows)
    console.print(
        f"step time off by {statistics.median(errors):.1%} (median), {max(errors):.1%} (worst); parameters equal to "
        f"the bit in {same} of {len(rows)}"
    )
    write_json(json_file, [row.as_dict() for row in rows])


def _codecs_table(rows: list[dict[str, Any]]) -> Table:
    title = "GB of float32 a second; +: with error feedback; error: squared, of one call, over that of zeros"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("codec", "encode", "decode", "both", "of copy", "bytes", "smaller", "error"):
        table.add_column(heading, justify="left" if heading == "codec" else "right", no_wrap=True)
    for row in rows:
        speeds = [f"{row['gb_per_s'][name]:.2f}" for name in ("encode", "decode", "both")]
        size = f"{row['packet_bytes']:,}", _times(row["ratio"])
        name = f"{row['codec']} +" if row["feedback"] else row["codec"]
        table.add_row(name, *speeds, f"{row['of_copy']:.0%}", *size, f"{row['error']:.1e}")
    return table


def _fidelity_table(rows: list[fidelity_bench.SimulationCheck]) -> Table:
    table = Table(title="median ms a step, 4 hosts", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("model", "strategy", "rate", "ranks", "lab", "simulated", "off by", "bits"):
        table.add_column(heading, justify="left" if heading in ("model", "strategy") else "right", no_wrap=True)
    for row in rows:
        where = (row.model, row.strategy, row.rate, str(4 * row.ranks))
        times = _ms(row.real_s), _ms(row.simulated_s), f"{row.error:+.1%}"
        table.add_row(*where, *times, "same" if row.same_bits else "differ")
    return table


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
        table.add_row(format_size(row["num_bytes"]), str(row["workers"]), *times, *ratios)
    return table


def _collectives_table(result: dict[str, Any]) -> Table:
    """A row per algorithm, a column per size: milliseconds, and the prediction as a multiple of them."""
    rows = result["rows"]
    table = Table(title="median ms an all-reduce, and (predicted / measured)", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for row in rows:
        table.add_column(format_size(row["num_bytes"]), justify="right")
    for name in rows[0]["seconds"]:
        cells = []
        for row in rows:
            seconds = row["seconds"][name]
            cell = f"{seconds * 1e3:.2f}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"
            if name in row["predicted"]:
                cell += f"\n({row['predicted'][name] / seconds:.2f})"
            cells.append(cell)
        table.add_row(label(name).replace(" ", "\n"), *cells)
    return table


def _said(rows: list[dict[str, Any]]) -> str:
    """What `cheapest` chose, a run of sizes at a time."""
    runs = [(name, list(group)) for name, group in groupby(rows, key=lambda row: row["cheapest"])]
    return ", ".join(f"{name} from {format_size(group[0]['num_bytes'])}" for name, group in runs)


def _note_mpi(console: Console) -> None:
    if not under_mpi.available():
        console.print("Open MPI was not timed: pip install 'tutti[mpi]' to have it.")


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.2f}"


def _us(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e6:,.1f}"


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}×"
