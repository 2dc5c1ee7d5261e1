"""`tutti bench meshes`: the planner's prediction for every mesh against simulated or measured step times."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table

from tutti.cli.bench.output import plain_table
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.lab_option import open_lab
from tutti.cli.options import JsonFile, LabText, NumRounds, parse_worker_counts, refuse_given, split_list
from tutti.cluster import Link, format_time
from tutti.errors import ConfigError, UnknownName
from tutti.recipes import RECIPES

if TYPE_CHECKING:
    from tutti.bench.meshes import MeshComparison

_MODELS, _RATES, _WORKERS = "mnist-mlp,char-gpt,cifar-quick", "100mbit,1gbit,10gbit", "2,4,8"
_MOST_WORKERS = 8
"""A step has 64 samples over all ranks, which more pipeline stages could not be given microbatches of."""


def meshes(
    context: typer.Context,
    models: Annotated[str, typer.Option(help=f"Comma-separated recipes: {', '.join(RECIPES)}.")] = _MODELS,
    rates: Annotated[
        str, typer.Option(help="Comma-separated rates of the simulated links. Each host has one rank.")
    ] = _RATES,
    workers: Annotated[
        str, typer.Option("--workers", "-n", help=f"Comma-separated numbers of workers, up to {_MOST_WORKERS}.")
    ] = _WORKERS,
    quick: Annotated[
        bool, typer.Option("--quick", metavar="", help="Compare one model at one rate with 4 workers, instead of all.")
    ] = False,
    lab: LabText = None,
    rounds: NumRounds = 5,
    json_file: JsonFile = None,
) -> None:
    """Compare the planner's predictions for every mesh with simulated step times, or with measured ones (--lab).

    A step has 64 samples over all ranks. Simulated ranks compute at 10 Gflop/s.

    --rates and --workers apply to the simulation only, --rounds to the lab only.
    """
    check_writable(json_file)
    if lab is not None:
        refuse_given(context, ("rates", "workers", "quick"), "changes nothing with --lab, which has its own.")
    else:
        refuse_given(context, ("rounds",), "changes nothing without --lab: simulated steps need no repetition.")
    if quick:
        refuse_given(context, ("models", "rates", "workers"), "changes nothing with --quick, which has its own.")
    # `--quick` has a model, a rate and a number of workers of its own.
    names = split_list(_MODELS)[:1] if quick else split_list(models)
    speeds = ["1gbit"] if quick else split_list(rates)
    numbers = [4] if quick else parse_worker_counts(workers, 2, "2,4")
    _check(names, speeds, numbers)
    console = Console()
    comparisons: list[MeshComparison] = []
    with console.status("starting") as status:
        if lab is None:
            compared, kind = _simulate(names, speeds, numbers, status), "simulated"
        else:
            compared, kind = _measure(names, lab, rounds, status), "measured"
        for comparison in compared:
            comparisons.append(comparison)
            console.print(_table(comparison, kind))
            # After each case: the whole benchmark takes long, and a stopped one leaves what it has.
            write_json(json_file, _as_dict(comparisons))
    for line in _closing_lines(comparisons):
        console.print(line, highlight=False)


def _check(names: list[str], rates: list[str], numbers: list[int]) -> None:
    """Refuse unknown recipes, rates that cannot be read, and too many workers, before anything is profiled."""
    for name in names:
        if name not in RECIPES:
            raise UnknownName("recipe", name, RECIPES)
    for rate in rates:
        Link(rate, 0.0)
    if max(numbers) > _MOST_WORKERS:
        raise ConfigError(f"--workers goes up to {_MOST_WORKERS}, got {max(numbers)}.")


def _simulate(names: list[str], rates: list[str], numbers: list[int], status: Status) -> "Iterator[MeshComparison]":
    """Compare predictions with simulated steps, case by case."""
    from tutti.bench import meshes as benchmark

    for name in names:
        status.update(f"profiling the parts of {name}")
        # Once for all rates: computing does not depend on the links.
        profiled = benchmark.profile_parts(name, numbers)
        for rate in rates:
            for number in numbers:
                yield benchmark.compare(name, rate, number, profiled, status.update)


def _measure(names: list[str], lab: str, rounds: int, status: Status) -> "Iterator[MeshComparison]":
    """Compare predictions with steps on the hosts of a lab, model by model."""
    from tutti.bench import meshes as benchmark

    for name in names:
        status.update(f"measuring {name} in lab {lab}")
        # A new lab for each model, without connections or queues of the one before.
        with open_lab(lab) as hosts:
            assert hosts is not None
            comparison = benchmark.in_lab(name, hosts, rounds)
        yield comparison


def _closing_lines(comparisons: "list[MeshComparison]") -> list[str]:
    """How far predictions were off, and how often the first choice was right."""
    from tutti.bench.meshes import error_summary
    from tutti.bench.planner_accuracy import NEAR_BEST

    rows = [row for comparison in comparisons for row in comparison.rows]
    median, worst = error_summary(rows)
    right = sum(comparison.times <= NEAR_BEST for comparison in comparisons)
    return [
        f"error of predicted step times: median {median:.1%}, worst {worst:.1%}, over {len(rows)} meshes",
        f"the first choice is within {NEAR_BEST - 1:.0%} of the fastest in {right} of {len(comparisons)} cases",
    ]


def _as_dict(comparisons: "list[MeshComparison]") -> dict[str, Any]:
    from tutti.bench.meshes import error_summary

    median, worst = error_summary([row for comparison in comparisons for row in comparison.rows])
    cases = [comparison.as_dict() for comparison in comparisons]
    return {"median_error": median, "worst_error": worst, "cases": cases}


def _table(comparison: "MeshComparison", kind: str) -> Table:
    """`kind` says where the times come from: "simulated" or "measured"."""
    from tutti.plan.mesh.choose import describe_mesh

    first = comparison.rows[0]
    table = plain_table(f"{first.model}, {first.rate}")
    table.caption = f">: the planner's first choice, {comparison.times:.2f} times the fastest"
    table.add_column("mesh", no_wrap=True)
    for heading in ("predicted", kind, "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in comparison.rows:
        mark = "> " if row is comparison.chosen else "  "
        times = (format_time(seconds) for seconds in (row.prediction.step_s, row.taken_s))
        table.add_row(f"{mark}{describe_mesh(row.prediction.mesh)}", *times, f"{row.error:+.0%}")
    return table
