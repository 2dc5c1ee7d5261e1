"""`tutti bench compression`: whether gradient compression pays for a model on a link."""

import re
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from tutti.bench.models import MODEL_NAMES, check_model_names
from tutti.cli.bench.output import plain_table, show_activity
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.lab_option import check_workers_or_lab, describe_hosts, launch_arguments, open_lab
from tutti.cli.options import JsonFile, LabText, NumRounds
from tutti.cluster import format_size
from tutti.errors import ConfigError

if TYPE_CHECKING:
    from tutti.bench.compression import CompressionReport

_DEFAULT_WORKERS = 2

_LABELS = {"solo": "no exchange", "ddp": "DDP", "ddp fp16": "DDP, fp16 hook", "ddp powersgd": "DDP, PowerSGD hook"}


def compression(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help=f"Model to train: {', '.join(MODEL_NAMES)}.")
    ] = "mlp-1.9M",
    lab: LabText = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", "-n", min=2, help="Number of workers on this machine.", show_default=str(_DEFAULT_WORKERS)
        ),
    ] = None,
    strategy: Annotated[str, typer.Option(help="Exact strategy that the codecs are compared with.")] = "ring",
    codecs: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated codecs to time; + chains two, such as topk:0.01+quantize:8.",
            show_default="every codec",
        ),
    ] = None,
    ddp_hooks: Annotated[
        bool,
        typer.Option("--ddp-hooks", metavar="", help="Also time DDP with its fp16 and PowerSGD communication hooks."),
    ] = False,
    rounds: NumRounds = 9,
    json_file: JsonFile = None,
) -> None:
    """Time training steps with every codec, without compression and under DDP, and recommend one or none."""
    from tutti.bench import compression as benchmark
    from tutti.launch import launch

    check_writable(json_file)
    check_workers_or_lab(workers, lab)
    check_model_names([model])
    names = list(benchmark.DEFAULT_CODECS) if codecs is None else _split_codecs(codecs)
    _check_codecs(strategy, names)
    console = Console()
    with open_lab(lab) as hosts:
        where = describe_hosts(workers or _DEFAULT_WORKERS, hosts)
        with console.status(f"{model}, {where}: starting") as status:
            show = show_activity(status, f"{model}, {where}: ")
            chosen = launch_arguments(workers or _DEFAULT_WORKERS, hosts)
            fields = launch(benchmark.measure, model, strategy, names, ddp_hooks, rounds, watch=show, **chosen)[0]
    report = benchmark.CompressionReport(**fields)
    console.print(_table(report, where))
    console.print(report.recommendation())
    write_json(json_file, {"lab": lab, **fields, "recommendation": report.recommendation()})


def _split_codecs(text: str) -> list[str]:
    # A comma may also separate the options of one codec: those have an equals sign.
    return [name.strip() for name in re.split(r",(?!\s*\w+=)", text) if name.strip()]


def _check_codecs(strategy: str, codecs: list[str]) -> None:
    """Refuse a strategy that compresses, and unknown codecs."""
    from tutti.codecs import parse_codec
    from tutti.strategies import parse

    if parse(strategy).codec is not None:
        raise ConfigError(
            f"--strategy takes an exact strategy such as ring, got '{strategy}': codecs go into --codecs."
        )
    if not codecs:
        raise ConfigError("--codecs needs one or more, such as onebit,lowrank.")
    for codec in codecs:
        parse_codec(codec)


def _table(report: "CompressionReport", where: str) -> Table:
    table = plain_table(f"{report.model}, {report.num_parameters:,} parameters, {where}: median milliseconds per step")
    table.caption = "×: speed relative to DDP and to the exact strategy; sent: bytes of one rank per step"
    for heading in ("", "ms", "× DDP", f"× {report.exact}", "sent"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    ddp_s, exact_s = report.seconds["ddp"], report.seconds[report.exact]
    for name, seconds in report.seconds.items():
        sent = format_size(round(report.bytes_sent[name])) if name in report.bytes_sent else ""
        ratios = f"{ddp_s / seconds:.2f}", f"{exact_s / seconds:.2f}"
        table.add_row(_LABELS.get(name, name), f"{seconds * 1e3:.2f}", *ratios, sent)
    return table
