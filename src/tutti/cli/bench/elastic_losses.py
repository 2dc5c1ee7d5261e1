"""Parts of `tutti bench elastic` in which workers are lost: kills, and the matrix of faults."""

from collections.abc import Sequence
from dataclasses import asdict
from math import ceil
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.status import Status

from tutti.cli.bench.output import format_ms, plain_table
from tutti.errors import ConfigError

if TYPE_CHECKING:
    from tutti.bench.elastic.kills import LossOutcome
    from tutti.bench.elastic.matrix import CellOutcome


def kills(
    console: Console, status: Status, number: int, seed: int, words: list[str], *, quick: bool
) -> list[dict[str, Any]]:
    """Kill workers, and print what each loss took."""
    from tutti.bench.elastic.kills import QUICK, losses, subjects

    chosen = QUICK if quick else subjects(with_lab=_has_lab(console))
    chosen = [each for each in chosen if all(word in ", ".join(each) for word in words)]
    _check_some(chosen, words)
    total = 0

    def done(outcome: "LossOutcome") -> None:
        nonlocal total
        total += 1
        status.update(f"killing workers: {total} runs so far, the last under {outcome.strategy}")

    outcomes = losses(number, seed, chosen, done=done)
    table = plain_table("Losses: milliseconds from the kill to the next step of all survivors")
    for heading in ("strategy", "transport", "kills", "others", "median ms", "slowest", "void", "wrong"):
        table.add_column(heading, justify="left" if heading in ("strategy", "transport") else "right")
    for each in outcomes:
        numbers = map(str, (each.kills, each.others))
        times = format_ms(each.median_s), format_ms(each.slowest_s)
        table.add_row(
            each.strategy.partition(":exact")[0],
            each.transport,
            *numbers,
            *times,
            str(each.voided),
            str(len(each.problems)),
        )
    console.print(table)
    console.print("others: runs with another fault; void: most void steps of a worker in a run", highlight=False)
    for each in outcomes:
        for problem in each.problems:
            line = problem.partition("\n")[0]
            console.print(f"{each.strategy}, {each.transport}: {line}", markup=False, highlight=False)
    seconds = sorted(second for each in outcomes for second in each.seconds)
    if seconds:
        console.print(
            f"{sum(each.kills for each in outcomes)} kills: {format_ms(median(seconds))} ms in the median, "
            f"{format_ms(seconds[ceil(0.99 * len(seconds)) - 1])} in 99 of 100, {format_ms(seconds[-1])} at most",
            highlight=False,
        )
    return [{"part": "kills", **asdict(each)} for each in outcomes]


def matrix(console: Console, status: Status, words: list[str]) -> list[dict[str, Any]]:
    """Run each strategy over each transport with each fault, and print which ones did not keep their promise."""
    from tutti.bench.elastic.matrix import measure
    from tutti.bench.elastic.promises import FAULTS, LAB, STRATEGIES, cells

    has_lab = _has_lab(console)
    chosen = [each for each in cells() if has_lab or each.transport != LAB]
    chosen = [each for each in chosen if all(word in str(each) for word in words)]
    _check_some(chosen, words)
    number = 0

    def done(outcome: "CellOutcome") -> None:
        nonlocal number
        number += 1
        status.update(f"{number} of {len(chosen)} done, the last was {outcome.cell}")
        for problem in outcome.problems:
            console.print(f"{outcome.cell}: {problem}\n{outcome.said}", markup=False, highlight=False)

    outcomes = measure(chosen, done)
    table = plain_table("Faults: runs that kept what their strategy promises, of all runs over all transports")
    faults = [each for each in FAULTS if any(cell.fault == each for cell in chosen)]
    for heading in ("fault", *(each for each in STRATEGIES if any(cell.strategy == each for cell in chosen))):
        table.add_column(heading.partition(":")[0], justify="left" if heading == "fault" else "right")
    for fault in faults:
        row = []
        for strategy in STRATEGIES:
            found = [each for each in outcomes if (each.cell.strategy, each.cell.fault) == (strategy, fault)]
            if any(cell.strategy == strategy for cell in chosen):
                row.append(f"{sum(not each.problems for each in found)}/{len(found)}")
        table.add_row(fault, *row)
    console.print(table)
    wrong = sum(bool(each.problems) for each in outcomes)
    console.print(f"{len(outcomes)} runs, of which {wrong} did not keep their promise", highlight=False)
    return [{"part": "matrix", **asdict(each), "promise": each.cell.promise} for each in outcomes]


def goodput(console: Console, status: Status, data: Path | None, *, quick: bool) -> list[dict[str, Any]]:
    """Kill a worker every minute, and print how much of its work the run did."""
    from tutti.bench.elastic.goodput import RECIPE, WORKERS, measure

    status.update("training with a kill every minute")
    found = measure(1, data, 6.0) if quick else measure(3, data)
    stalls = ", ".join(f"{format_ms(each)}" for each in found.stalls_s)
    console.print(
        f"Goodput of {RECIPE} on {WORKERS} workers with a kill every {found.minute_s:g} s: {100 * found.goodput:.1f} % "
        f"({', '.join(f'{100 * each:.1f}' for each in found.minutes)}; without a kill {100 * found.control:.1f}). "
        f"Longest pauses {stalls} ms, a step takes {format_ms(found.step_s)} ms. {found.kills} were killed, "
        f"{found.replaced} came in their place.",
        highlight=False,
    )
    return [{"part": "goodput", **asdict(found), "goodput": found.goodput}]


def peers(console: Console, status: Status, rounds: int) -> list[dict[str, Any]]:
    """Kill a worker under Tutti and under others, and print what that costs."""
    from tutti.bench.elastic.peers import measure, missing

    table, rows = plain_table("Loss of one of 4 workers; the end beside that of a run without a loss"), []
    for heading in ("system", "median ms", "slowest", "unused samples", "used again", "parameters differ by"):
        table.add_column(heading, justify="left" if heading == "system" else "right")
    for name in ("tutti", "torchft", "torchrun"):
        status.update(f"killing a worker under {name}")
        if reason := missing(name):
            console.print(f"{name} is left out: {reason}", markup=False, highlight=False)
            continue
        found = measure(name, rounds)
        rows.append({"part": "peers", **asdict(found)})
        if found.problem:
            console.print(f"{name} failed: {found.problem}", markup=False, highlight=False)
        else:
            times = format_ms(found.median_s), format_ms(max(found.seconds))
            table.add_row(name, *times, str(found.unused), str(found.again), f"{found.difference:.0e}")
    console.print(table)
    return rows


def _has_lab(console: Console) -> bool:
    """Whether labs are possible here; says why not."""
    from tutti.launch.lab.lab import missing

    if reason := missing():
        console.print(f"Without hosts of a lab: {reason}", markup=False, highlight=False)
    return not reason


def _check_some(chosen: Sequence[Any], words: list[str]) -> None:
    if not chosen:
        raise ConfigError(f"no strategy, transport or fault has the words {', '.join(words)} (--only).")
