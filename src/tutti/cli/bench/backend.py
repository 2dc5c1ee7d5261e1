"""`tutti bench backend`: torch.distributed on the "tutti" backend and on Gloo."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tutti.bench.models import MODEL_NAMES, check_model_names
from tutti.cli.bench.output import plain_table, show_activity
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.lab_option import check_workers_or_lab, open_lab
from tutti.cli.options import JsonFile, LabText, NumRounds, parse_worker_counts, refuse_given, split_list
from tutti.cluster import format_size
from tutti.errors import ConfigError
from tutti.recipes import recipe


def backend(
    context: typer.Context,
    models: Annotated[
        str,
        typer.Option(
            help=f"Comma-separated models to train: {', '.join(MODEL_NAMES)}. Empty: time single operations only."
        ),
    ] = "mnist-mlp",
    workers: Annotated[
        str | None,
        typer.Option("--workers", "-n", help="Comma-separated numbers of workers on this machine.", show_default="2,4"),
    ] = None,
    lab: LabText = None,
    simulate: Annotated[
        str | None,
        typer.Option(
            metavar="RECIPE",
            help="Train this recipe under FSDP2 in the lab and in virtual time instead, and compare both.",
        ),
    ] = None,
    rounds: NumRounds = 15,
    json_file: JsonFile = None,
) -> None:
    """Time DDP, FSDP2 and single operations of torch.distributed on the backends "tutti" and "gloo"."""
    check_writable(json_file)
    names = tuple(split_list(models))
    check_model_names(names)
    check_workers_or_lab(workers, lab)
    console = Console()
    if simulate is not None:
        refuse_given(context, ("models", "workers"), "changes nothing with --simulate.")
        _compare_simulation(simulate, lab, rounds, json_file, console)
        return
    rows = _measure(names, rounds, workers or "2,4", lab, console)
    console.print(_table(rows))
    write_json(json_file, {"lab": lab, "rows": rows})


def _measure(
    models: tuple[str, ...], rounds: int, workers: str, lab: str | None, console: Console
) -> list[dict[str, Any]]:
    from tutti.bench.backend import LAB_SIZES, SIZES, BackendBenchmark, measure
    from tutti.launch import launch

    # Shaped links are far slower than memory: the largest sizes would take minutes there.
    benchmark = BackendBenchmark(models, rounds, SIZES if lab is None else LAB_SIZES)
    rows: list[dict[str, Any]] = []
    with open_lab(lab) as hosts, console.status("starting") as status:
        if hosts is not None:
            # A lab has a fixed number of ranks, so one launch is all there is to time.
            return launch(measure, benchmark, on=hosts, watch=show_activity(status))[0]
        for number in parse_worker_counts(workers, 2, "2,4"):
            rows += launch(measure, benchmark, workers=number, watch=show_activity(status))[0]
    return rows


def _table(rows: list[dict[str, Any]]) -> Table:
    """Both backends, operation by operation. A subject is a size in bytes, or the name of a model."""
    table = plain_table("Median milliseconds; ×: speed on Tutti relative to Gloo")
    for heading in ("operation", "of", "workers", "Gloo", "Tutti", "×"):
        table.add_column(heading, justify="left" if heading in ("operation", "of") else "right", no_wrap=True)
    for row in rows:
        gloo_s, tutti_s = row["seconds"]["gloo"], row["seconds"]["tutti"]
        subject = format_size(int(row["subject"])) if row["subject"].isdigit() else row["subject"]
        times = f"{1e3 * gloo_s:.3f}", f"{1e3 * tutti_s:.3f}", f"{gloo_s / tutti_s:.2f}×"
        table.add_row(row["operation"], subject, str(row["workers"]), *times)
    return table


def _compare_simulation(model: str, lab: str | None, steps: int, json_file: Path | None, console: Console) -> None:
    """Train under FSDP2 in a lab and in virtual time; print the step times and whether parameters are equal."""
    from tutti.bench.backend_fidelity import compare
    from tutti.launch.lab.lab import Lab, LabSpec

    recipe(model)
    if lab is None:
        raise ConfigError("--simulate needs a lab to compare with, such as --lab hosts=8,rate=100mbit.")
    with (
        Lab(LabSpec.parse(lab)) as hosts,
        console.status(f"training {model} under FSDP2, in {lab} and in virtual time"),
    ):
        fidelity = compare(model, hosts, steps)
    for name, seconds in fidelity.lab_s.items():
        bits = "bit-identical to" if fidelity.same_bits[name] else "other bits than"
        console.print(f"{name}: {1e3 * seconds:.1f} ms per step in the lab; parameters: {bits} those in virtual time")
    console.print(f"in virtual time: {1e3 * fidelity.simulated_s:.1f} ms per step, error {fidelity.error:+.1%}")
    write_json(json_file, {"lab": lab, **fidelity.as_dict()})
