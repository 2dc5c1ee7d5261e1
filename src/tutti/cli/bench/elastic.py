"""`tutti bench elastic`: what does the loss of a worker cost, and does training end where it would have ended?"""

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.status import Status

from tutti.bench.models import MODEL_NAMES, check_model_names
from tutti.cli.bench import elastic_losses
from tutti.cli.bench.output import format_ms, plain_table
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.options import DataFolder, JsonFile, refuse_given, split_list
from tutti.errors import ConfigError

PARTS = {
    "kills": "kills of workers at random moments, and some other faults, under all strategies and transports",
    "joins": "what a new worker costs the others, with models of three sizes",
    "cost": "the cost of being able to lose a worker, while none is lost",
    "goodput": "training of mnist-mlp on 8 workers with a kill every minute, for 4 minutes",
    "peers": "the loss of a worker under Tutti, torchft (if installed) and torchrun",
    "matrix": "each strategy over each transport with each fault, about 10 minutes",
}
_DEFAULT = ("kills", "cost")
_Simulated = Annotated[
    int | None,
    typer.Option(
        help="Instead of the parts: number of seeded runs in virtual time, with random kills, stops, cuts, leaves "
        "and joins, under all strategies; 1,000 take about 10 minutes.",
        min=1,
    ),
]


def elastic(
    context: typer.Context,
    parts: Annotated[
        str,
        typer.Option(help=f"Comma-separated parts: {'; '.join(f'{name}: {text}' for name, text in PARTS.items())}."),
    ] = ",".join(_DEFAULT),
    kills: Annotated[
        int, typer.Option(help="Number of kills, divided between strategies and transports.", min=1)
    ] = 100,
    only: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated words, such as 'ring,lab': the strategies, transports and faults with them."
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help=f"Model for the cost without losses: {', '.join(MODEL_NAMES)}.")
    ] = "mlp-0.1M",
    data: DataFolder = None,
    simulated: _Simulated = None,
    seed: Annotated[int, typer.Option(help="Seed of what is random: moments and ranks of failures.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", metavar="", help="Four kills under two strategies.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Kill workers of elastic runs at random moments, and compare the end with that of an undisturbed run.

    Hosts of a lab are among the transports where labs are possible (`tutti lab`). The status is 1 if a run did not
    keep what its strategy promises.

    Example: tutti bench elastic --kills 40 --only lab
    """
    check_writable(json_file)
    check_model_names([model])
    chosen, words = split_list(parts), split_list(only) if only else []
    if unknown := [part for part in chosen if part not in PARTS]:
        raise ConfigError(f"no part of this benchmark is called '{unknown[0]}'. Known: {', '.join(PARTS)}.")
    console, rows = Console(), []
    if simulated is not None:
        _simulated(context, console, simulated)
        return
    with console.status("starting") as status:
        if "kills" in chosen:
            rows += elastic_losses.kills(console, status, 4 if quick else kills, seed, words, quick=quick)
        if "matrix" in chosen:
            rows += elastic_losses.matrix(console, status, words)
        if "joins" in chosen:
            rows += _joins(console, status)
        if "goodput" in chosen:
            rows += elastic_losses.goodput(console, status, data, quick=quick)
        if "peers" in chosen:
            rows += elastic_losses.peers(console, status, rounds=1 if quick else 3)
        if "cost" in chosen:
            rows += _cost(console, status, model)
    write_json(json_file, rows)
    if any(row.get("problems") for row in rows):  # Those of other systems do not count.
        raise typer.Exit(1)


def _joins(console: Console, status: Status) -> list[dict[str, Any]]:
    from tutti.bench.elastic.joins import MODELS, TRANSPORTS, measure

    rows = []
    for model in MODELS:
        for transport in TRANSPORTS:
            status.update(f"a worker joins: {model}, {transport}")
            found = measure(model, transport)
            console.print(
                f"A worker joins, {model} with Adam, {transport}: the others lose {format_ms(found.lost_s)} ms, "
                f"{found.lost_steps:.1f} of their steps of {format_ms(found.step_s)} ms; the new one has taken its "
                f"first step {format_ms(found.joined_s)} ms after tutti.distribute",
                highlight=False,
            )
            rows.append({"part": "joins", **asdict(found), "lost_steps": found.lost_steps})
    return rows


def _simulated(context: typer.Context, console: Console, count: int) -> None:
    """Simulate seeded runs with failures, and print what became of them. Exits with status 1 if one went wrong."""
    refuse_given(context, ("parts", "kills", "only", "model", "data", "quick"), "changes nothing with --simulated.")
    rows = _simulated_rows(console, count, context.params["seed"])
    write_json(context.params["json_file"], rows)
    if any(row["problems"] for row in rows):
        raise typer.Exit(1)


def _simulated_rows(console: Console, count: int, seed: int) -> list[dict[str, Any]]:
    """Simulate seeded runs with failures; print and return what became of them, by strategy."""
    from tutti.bench.elastic.simulated import CaseOutcome, run

    outcomes: list[CaseOutcome] = []
    with console.status("simulating") as status:

        def done(outcome: CaseOutcome) -> None:
            outcomes.append(outcome)
            status.update(f"{len(outcomes)} of {count} runs, the last under {outcome.case.subject.strategy}")
            for problem in outcome.problems:
                console.print(f"{outcome.case}\n  {problem}", markup=False, highlight=False)

        run(count, seed, done)
    table = plain_table(f"{count} runs in virtual time, seed {seed}")
    for heading in ("strategy", "runs", "ranks lost or left", "samples counted as lost", "differ by", "wrong"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    by_strategy: dict[str, list[CaseOutcome]] = {}
    for outcome in outcomes:
        by_strategy.setdefault(outcome.case.subject.strategy, []).append(outcome)
    rows = []
    for strategy, found in by_strategy.items():
        row: dict[str, Any] = {
            "part": "simulated",
            "strategy": strategy,
            "runs": len(found),
            "lost_ranks": sum(each.num_lost for each in found),
            "lost_samples": sum(each.lost_samples for each in found),
            "largest_difference": max(each.difference for each in found) if found[0].case.subject.exact else None,
            "problems": [f"{each.case}: {problem}" for each in found for problem in each.problems],
        }
        rows.append(row)
        difference = "-" if row["largest_difference"] is None else f"{row['largest_difference']:.0e}"
        counts = (str(row[name]) for name in ("runs", "lost_ranks", "lost_samples"))
        table.add_row(strategy, *counts, difference, str(sum(bool(each.problems) for each in found)))
    console.print(table)
    return rows


def _cost(console: Console, status: Status, model: str) -> list[dict[str, Any]]:
    from tutti.bench.elastic.cost import measure
    from tutti.launch.control_settings import ELASTIC
    from tutti.launch.local import supervise

    status.update("timing steps without losses")
    found = supervise(measure, (model,), 2, {ELASTIC: "2:2"}).run()[0]
    console.print(
        f"Without losses, {found.model}, 2 workers: {1e6 * found.ready_s:.1f} µs of a step of "
        f"{format_ms(found.step_s)} ms, {100 * found.share:.2f} %",
        highlight=False,
    )
    return [{"part": "cost", **asdict(found), "share": found.share}]
