"""`tutti bench meshes`: does a mesh take what the planner says?"""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tutti.bench import meshes as bench
from tutti.bench.planner_accuracy import NEAR_BEST
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.place import lab_if_any, numbers_of_workers
from tutti.cluster import Link, format_time
from tutti.errors import ConfigError, UnknownName
from tutti.plan.mesh.choose import in_words
from tutti.recipes import RECIPES


def meshes(
    models: Annotated[str, typer.Option(help=f"Some of {', '.join(RECIPES)}.")] = ",".join(bench.MODELS),
    rates: Annotated[str, typer.Option(help="Of the links, one rank a host.")] = ",".join(bench.RATES),
    workers: Annotated[str, typer.Option("--workers", "-n", help="Numbers of workers, up to 8.")] = "2,4,8",
    quick: Annotated[bool, typer.Option("--quick", help="One model, one rate, 4 workers.")] = False,
    lab: Annotated[
        str | None, typer.Option(metavar="SPEC", help="In processes instead, such as hosts=4,rate=1gbit.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="In a lab, rounds of each mesh; the median counts.")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")] = None,
) -> None:
    """The planner's meshes against the same jobs in virtual time: what a step takes, and which mesh comes first.

    64 samples a step over all ranks, which compute 10 Gflop/s.
    """
    check_writable(json_file)
    names = [bench.MODELS[0]] if quick else _parts(models)
    for name in names:
        if name not in RECIPES:
            raise UnknownName("recipe", name, RECIPES)
    speeds = ["1gbit"] if quick else _parts(rates)
    for rate in speeds:
        Link(rate, 0.0)
    numbers = [4] if quick else numbers_of_workers(workers, 2, "2,4")
    if max(numbers) > max(bench.WORKERS):
        raise ConfigError(f"--workers goes up to {max(bench.WORKERS)}, got {max(numbers)}.")
    console, cases = Console(), list[bench.MeshComparison]()
    with console.status("starting") as status:
        for name in names:
            if lab is not None:
                with lab_if_any(lab) as hosts:
                    assert hosts is not None
                    cases.append(bench.in_lab(name, hosts, rounds))
                console.print(_table(cases[-1], "measured"))
                continue
            status.update(f"trying out parts of {name}")
            tried = bench.try_out(name, numbers)
            for rate, number in ((rate, number) for rate in speeds for number in numbers):
                cases.append(bench.compare(name, rate, number, tried, status.update))
                console.print(_table(cases[-1], "simulated"))
                write_json(json_file, _as_dict(cases))
    write_json(json_file, _as_dict(cases))
    rows = [row for case in cases for row in case.rows]
    middle, worst = bench.error_summary(rows)
    right = sum(case.times <= NEAR_BEST for case in cases)
    console.print(f"steps off by {middle:.1%} (median), {worst:.1%} (worst) of {len(rows)}", highlight=False)
    console.print(
        f"the first choice is within {NEAR_BEST - 1:.0%} of the fastest in {right} of {len(cases)}", highlight=False
    )


def _parts(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",")))


def _as_dict(cases: list[bench.MeshComparison]) -> dict[str, Any]:
    middle, worst = bench.error_summary([row for case in cases for row in case.rows])
    return {"median_error": middle, "worst_error": worst, "cases": [case.as_dict() for case in cases]}


def _table(case: bench.MeshComparison, taken: str) -> Table:
    first = case.rows[0]
    table = Table(title=f"{first.model}, {first.rate}", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.caption = f"> the planner's first choice, {case.times:.2f} times the fastest"
    table.add_column("mesh", no_wrap=True)
    for heading in ("predicted", taken, "off by"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in case.rows:
        mark = "> " if row is case.chosen else "  "
        times = (format_time(seconds) for seconds in (row.prediction.step_s, row.taken_s))
        table.add_row(f"{mark}{in_words(row.prediction.mesh)}", *times, f"{row.error:+.0%}")
    return table
