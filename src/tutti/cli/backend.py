"""`tutti bench backend`: torch.distributed on Tutti's groups and on Gloo's."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tutti.bench.backend import LAB_SIZES, SIZES, BackendBenchmark, measure
from tutti.bench.step import CASES
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.place import check_one_place, lab_if_any, numbers_of_workers
from tutti.cluster import format_size
from tutti.errors import ConfigError, UnknownName
from tutti.launch import launch
from tutti.launch.lab.lab import Lab, LabSpec
from tutti.recipes import recipe


def backend(
    models: Annotated[str, typer.Option(help=f"Some of {', '.join(CASES)}; none: operations alone.")] = "mnist-mlp",
    workers: Annotated[
        str | None, typer.Option("--workers", "-n", help="Numbers of workers on this machine; 2,4 by default.")
    ] = None,
    lab: Annotated[
        str | None, typer.Option("--lab", metavar="SPEC", help="On hosts made for it, such as hosts=4,rate=100mbit.")
    ] = None,
    simulate: Annotated[
        str | None, typer.Option(help="Instead: FSDP2 of this recipe in the lab, and the same in virtual time.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of every way, in turn; the median counts.")] = 15,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")] = None,
) -> None:
    """DDP, FSDP2 and single operations with backend "tutti" and with "gloo", interleaved."""
    check_writable(json_file)
    names = tuple(name for name in models.split(",") if name)
    for name in names:
        if name not in CASES:
            raise UnknownName("model", name, CASES)
    check_one_place(workers, lab)
    console = Console()
    if simulate is not None:
        _simulate(simulate, lab, rounds, json_file, console)
        return
    request, rows = BackendBenchmark(names, rounds, SIZES if lab is None else LAB_SIZES), []
    with lab_if_any(lab) as hosts, console.status("starting") as status:

        def show(rank: int, values: dict[str, Any]) -> None:
            if rank == 0:
                status.update(values["doing"])

        if hosts is not None:
            rows = launch(measure, request, lab=hosts, watch=show)[0]
        else:
            for number in numbers_of_workers(workers or "2,4", 2, "2,4"):
                rows += launch(measure, request, workers=number, watch=show)[0]
    console.print(_table(rows))
    write_json(json_file, {"lab": lab, "rows": rows})


def _table(rows: list[dict[str, Any]]) -> Table:
    title = "median ms of n workers; ×: how many times faster on Tutti than on Gloo"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("", "of", "n", "Gloo", "Tutti", "×"):
        table.add_column(heading, justify="left" if heading in ("", "of") else "right", no_wrap=True)
    for row in rows:
        gloo_s, tutti_s = row["seconds"]["gloo"], row["seconds"]["tutti"]
        subject = format_size(int(row["subject"])) if row["subject"].isdigit() else row["subject"]
        times = f"{1e3 * gloo_s:.3f}", f"{1e3 * tutti_s:.3f}", f"{gloo_s / tutti_s:.2f}×"
        table.add_row(row["way"], subject, str(row["workers"]), *times)
    return table


def _simulate(model: str, lab: str | None, steps: int, json_file: Path | None, console: Console) -> None:
    from tutti.bench.backend_fidelity import compare

    recipe(model)
    if lab is None:
        raise ConfigError("--simulate needs a lab to compare with, such as --lab hosts=8,rate=100mbit.")
    with Lab(LabSpec.parse(lab)) as hosts, console.status(f"FSDP2 of {model}, in {lab} and in virtual time"):
        found = compare(model, hosts, steps)
    for name, seconds in found.lab_s.items():
        bits = "the same bits as" if found.same_bits[name] else "other bits than"
        console.print(f"{name}: {1e3 * seconds:.1f} ms a step in the lab, {bits} in virtual time")
    console.print(f"in virtual time: {1e3 * found.simulated_s:.1f} ms a step, {found.error:+.1%} off")
    write_json(json_file, {"lab": lab, **found.as_dict()})
