"""`tutti bench checkpoints`: are killed runs continued as if nothing had happened, and what do checkpoints cost?"""

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.status import Status

from tutti.cli.bench.output import format_ms, format_ratio, plain_table, show_activity
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.options import JsonFile, NumRounds, split_list
from tutti.errors import ConfigError

if TYPE_CHECKING:
    from tutti.bench.checkpoints.kills import StormOutcome

PARTS = ("kills", "cost", "resume", "writing")

_MAX_SHARE, _MAX_TIMES_COPY, _MAX_SIZE, _MAX_TIMES_READ, _MIN_RATE = 0.02, 1.5, 1.02, 1.2, 0.8
"""The targets."""


def checkpoints(
    parts: Annotated[str, typer.Option(help=f"Comma-separated parts: {', '.join(PARTS)}.", show_default="all")] = "all",
    kills: Annotated[int, typer.Option(help="Number of kills, divided between the strategies.", min=1)] = 300,
    seed: Annotated[int, typer.Option(help="Seed of the moments and ranks of kills.")] = 0,
    rounds: NumRounds = 5,
    folder: Annotated[
        Path | None, typer.Option(help="Folder on the disk to measure.", show_default="a temporary one")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", metavar="", help="Six kills under three strategies, a small model and one round.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Kill training runs at random moments and continue them; then time checkpoints.

    Example: tutti bench checkpoints --parts kills --kills 60
    """
    check_writable(json_file)
    chosen = list(PARTS) if parts == "all" else split_list(parts)
    if unknown := [part for part in chosen if part not in PARTS]:
        raise ConfigError(f"no part of this benchmark is called '{unknown[0]}'. Known: {', '.join(PARTS)}.")
    console, rows = Console(), []
    with tempfile.TemporaryDirectory(prefix="tutti-checkpoints-", dir=folder) as name:
        for part in PARTS:
            if part not in chosen:
                continue
            with console.status(part) as status:
                if part == "kills":
                    rows += _kills(console, status, 6 if quick else kills, seed, quick)
                else:
                    measure = {"cost": _cost, "resume": _resume, "writing": _writing}[part]
                    rows += measure(console, status, Path(name) / part, 1 if quick else rounds, quick)
    write_json(json_file, rows)


def _verdict(met: bool) -> str:
    return "yes" if met else "no"


def _kills(console: Console, status: Status, kills: int, seed: int, quick: bool) -> list[dict[str, Any]]:
    from tutti.bench.checkpoints.kills import QUICK, SUBJECTS, storm

    def done(outcome: "StormOutcome") -> None:
        status.update(f"killing runs under {outcome.strategy}: {outcome.kills} so far")

    outcomes = storm(kills, seed, QUICK if quick else SUBJECTS, num_undisturbed=2 if quick else 8, done=done)
    table = plain_table("Kills that left an incomplete checkpoint; samples not used once; runs with another result")
    for heading in ("strategy", "kills", "runs", "incomplete", "samples", "results", "compared by"):
        table.add_column(heading, justify="left" if heading in ("strategy", "compared by") else "right")
    for each in outcomes:
        numbers = (each.kills, each.runs, each.incomplete, each.misused, each.different)
        table.add_row(each.strategy, *map(str, numbers), each.judged)
    console.print(table)
    for each in outcomes:
        for problem in each.problems:
            console.print(f"{each.strategy}: {problem}", markup=False, highlight=False)
    total, incomplete = sum(each.kills for each in outcomes), sum(each.incomplete for each in outcomes)
    console.print(
        f"{total} kills: {incomplete} left an incomplete checkpoint; all runs right under "
        f"{sum(each.right for each in outcomes)} of {len(outcomes)} strategies",
        highlight=False,
    )
    return [{"part": "kills", **asdict(each)} for each in outcomes]


def _cost(console: Console, status: Status, folder: Path, rounds: int, quick: bool) -> list[dict[str, Any]]:
    from tutti.bench.checkpoints.cost import measure
    from tutti.launch import launch

    rows = []
    table = plain_table("Cost of a checkpoint, 2 workers; targets: 2 % at one a minute, 1.5× a copy, size 1.02×")
    for heading in ("model", "state, MB", "extra ms", "at one a minute", "snapshot ms", "× copy", "size", "met"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for model in ("mlp-0.1M",) if quick else ("mlp-20M", "char-gpt"):
        arguments = (model, str(folder / model), rounds, 0.5 if quick else 10.0)
        row = launch(measure, *arguments, workers=2, watch=show_activity(status))[0]
        met = row["share"] <= _MAX_SHARE, row["times_copy"] <= _MAX_TIMES_COPY, row["size_ratio"] <= _MAX_SIZE
        table.add_row(
            model,
            f"{row['state_bytes'] / 1e6:.1f}",
            format_ms(row["extra_s"]),
            f"{100 * row['share']:.2f} %",
            format_ms(row["snapshot_s"]),
            format_ratio(row["times_copy"]),
            f"{row['size_ratio']:.4f}×",
            ", ".join(map(_verdict, met)),
        )
        rows.append({"part": "cost", **row, "met": list(met)})
    console.print(table)
    return rows


def _resume(console: Console, status: Status, folder: Path, rounds: int, quick: bool) -> list[dict[str, Any]]:
    from tutti.bench.checkpoints.resume import measure

    times = measure("mlp-0.1M" if quick else "mlp-20M", folder, workers=2, rounds=rounds, show=status.update)
    met = times.times_read <= _MAX_TIMES_READ
    console.print(
        f"First step of {times.model} after {times.start_s:.2f} s, and after {times.resume_s:.2f} s from a checkpoint "
        f"of {times.state_bytes / 1e6:.0f} MB, which takes {times.read_s:.2f} s to read: start-up + "
        f"{times.times_read:.2f} × reading (target {_MAX_TIMES_READ}: {_verdict(met)})",
        highlight=False,
    )
    return [{"part": "resume", **times.as_dict(), "met": met}]


def _writing(console: Console, status: Status, folder: Path, rounds: int, quick: bool) -> list[dict[str, Any]]:
    from tutti.bench.checkpoints.writing import measure
    from tutti.launch import launch

    arguments = (str(folder), 10**7 if quick else 10**9, rounds)
    row = launch(measure, *arguments, workers=4, watch=show_activity(status))[0]
    met = row["share"] >= _MIN_RATE
    console.print(
        f"{row['state_bytes'] / 1e6:.0f} MB of 4 workers are written at {row['checkpoint'] / 1e6:.0f} MB/s, and by dd "
        f"with fsync at {row['dd'] / 1e6:.0f} MB/s: {100 * row['share']:.0f} % (target {100 * _MIN_RATE:.0f} %: "
        f"{_verdict(met)})",
        highlight=False,
    )
    return [{"part": "writing", **row, "met": met}]
