"""`tutti bench worth`: is a codec worth it, for this model and this link?"""

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tutti.bench import compression as compression_bench
from tutti.bench.step import CASES
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.place import check_one_place, described, lab_if_any
from tutti.cluster import format_size
from tutti.codecs import parse_codec
from tutti.errors import ConfigError, UnknownName
from tutti.launch import launch
from tutti.plan.reason import has_codec
from tutti.strategies import parse


def worth(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"One of {', '.join(CASES)}.")] = "mlp-1.9M",
    lab: Annotated[
        str | None, typer.Option("--lab", metavar="SPEC", help="On hosts made for it, such as hosts=4,rate=100mbit.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", "-n", min=2, help="Processes on this machine; 2 by default.")
    ] = None,
    strategy: Annotated[str, typer.Option(help="Exact strategy that the codecs are compared with.")] = "ring",
    codecs: Annotated[str, typer.Option(help="Codecs to time, with commas between; chains have a plus.")] = ",".join(
        compression_bench.DEFAULTS
    ),
    peers: Annotated[bool, typer.Option(help="Also time DDP with its fp16 and PowerSGD hooks.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of every way, in turn; the median counts.")] = 9,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")] = None,
) -> None:
    """Training steps with every codec beside exact ones and DDP, interleaved; the last line says which to use."""
    check_writable(json_file)
    check_one_place(workers, lab)
    if model not in CASES:
        raise UnknownName("model", model, CASES)
    if has_codec(parse(strategy)):
        raise ConfigError(f"--strategy is what is exact, such as ring; codecs go into --codecs. Got '{strategy}'.")
    # A comma may also be between a codec's own options.
    names = [name.strip() for name in re.split(r",(?!\s*\w+=)", codecs) if name.strip()]
    if not names:
        raise ConfigError("--codecs needs one or more, such as onebit,lowrank.")
    for name in names:
        parse_codec(name)
    console = Console()
    with lab_if_any(lab) as hosts:
        where = described(workers or 2, hosts)
        chosen = {"workers": workers or 2} if hosts is None else {"lab": hosts}
        with console.status(f"{model}, {where}: starting") as status:

            def show(rank: int, values: dict[str, str]) -> None:
                if rank == 0 and "doing" in values:
                    status.update(f"{model}, {where}: {values['doing']}")

            found = launch(compression_bench.measure, model, strategy, names, peers, rounds, watch=show, **chosen)[0]
    result = compression_bench.CompressionReport(**found)
    console.print(_table(result, where))
    console.print(result.verdict())
    write_json(json_file, {"lab": lab, **found, "verdict": result.verdict()})


_LABELS = {"solo": "no exchange", "ddp": "DDP", "ddp fp16": "DDP, fp16 hook", "ddp powersgd": "DDP, PowerSGD hook"}


def _table(result: compression_bench.CompressionReport, where: str) -> Table:
    title = f"{result.model}, {result.num_parameters:,} parameters, {where}: median ms a step"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("", "ms", "× DDP", f"× {result.exact}", "sent by a rank"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    ddp_s, exact_s = result.seconds["ddp"], result.seconds[result.exact]
    for way, seconds in result.seconds.items():
        sent = format_size(round(result.bytes_sent[way])) if way in result.bytes_sent else ""
        ratios = f"{ddp_s / seconds:.2f}", f"{exact_s / seconds:.2f}"
        table.add_row(_LABELS.get(way, way), f"{seconds * 1e3:.2f}", *ratios, sent)
    return table
