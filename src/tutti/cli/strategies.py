"""`tutti bench strategies`: training steps of each beside the others, and what a slow worker costs."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tutti.bench import strategies as bench
from tutti.bench.step import CASES
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.place import check_one_place, described, lab_if_any
from tutti.cluster import format_size
from tutti.errors import ConfigError, UnknownName
from tutti.launch import launch
from tutti.launch.lab.lab import LabSpec
from tutti.strategies import is_strategy_name, parse

WAYS = "native,ps:bsp,ps:ssp=3,ps:async,ps:async,locks,ps:bsp,servers=1"


def strategies(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"One of {', '.join(CASES)}.")] = "mnist-mlp",
    lab: Annotated[
        str | None, typer.Option("--lab", metavar="SPEC", help="On hosts made for it, such as hosts=4,rate=1gbit.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", "-n", min=2, help="Workers on this machine; 2 by default.")
    ] = None,
    ways: Annotated[str, typer.Option("--strategies", help="What to time, with commas between.")] = WAYS,
    peers: Annotated[
        int | None,
        typer.Option(
            "--peers", metavar="STEPS", min=1, help="Also time DDP, and torch's PostLocalSGD of so many steps."
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples of a worker; the model's own by default.")] = None,
    slow: Annotated[
        float, typer.Option(min=1.0, help="How many times as long the last worker takes to compute.")
    ] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of every way, in turn; the median counts.")] = 7,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")] = None,
) -> None:
    """Training steps of strategies beside each other and beside workers that exchange nothing, interleaved.

    Ranks that only serve are added to the workers, and what needs them is timed in a run of its own. What exchanges
    something every so many steps is timed over as many.
    """
    check_writable(json_file)
    check_one_place(workers, lab)
    if model not in CASES:
        raise UnknownName("model", model, CASES)
    texts = strategies_to_time(ways)
    by_serving: dict[int, list[str]] = {}
    for text in texts:
        by_serving.setdefault(parse(text).num_dedicated_servers, []).append(text)
    console = Console()
    results: list[dict[str, Any]] = []
    for num_dedicated_servers, alike in by_serving.items():
        for group in [tuple(alike)] if not num_dedicated_servers else [(way,) for way in alike]:
            request = bench.StrategyBenchmark(
                model, group, rounds, slow, None if num_dedicated_servers else peers, batch
            )
            results.append(_timed(request, workers or 2, lab, num_dedicated_servers, console))
    where = described(workers or 2, None) if lab is None else f"lab {lab}"
    console.print(_table(results, f"{model}, {where}"))
    if slow > 1:
        console.print(f"The last worker computes for {slow:g} times as long as the others.")
    write_json(json_file, {"lab": lab, "runs": results})


def strategies_to_time(text: str) -> list[str]:
    """Strategies in one text, each once, as they call themselves; blocks must have a number of steps."""
    texts = list(dict.fromkeys(str(parse(part)) for part in split_strategies(text)))
    if not texts:
        raise ConfigError("--strategies needs one or more, such as native,ps:bsp.")
    if timed := [each for each in texts if isinstance(getattr(parse(each), "every", 1), str)]:
        raise ConfigError(f"whole blocks are timed: give '{timed[0]}' a number of steps, such as every=16.")
    return texts


def split_strategies(text: str) -> list[str]:
    """Strategies in one text: what follows a comma and is no strategy's name belongs to the one before it."""
    found: list[str] = []
    for part in text.split(","):
        name = part.strip().partition(":")[0].partition("+")[0]
        if found and not is_strategy_name(name) and ":" in found[-1]:
            found[-1] += f",{part.strip()}"
        elif part.strip():
            found.append(part.strip())
    return found


def _timed(
    request: bench.StrategyBenchmark, workers: int, lab: str | None, num_dedicated_servers: int, console: Console
) -> dict[str, Any]:
    if lab is not None and num_dedicated_servers:
        spec = LabSpec.parse(lab)
        if spec.ranks_per_host > 1 or len(set(spec.rates)) > 1:
            raise ConfigError("with servers of their own, a lab needs one rank a host and one rate.")
        lab = lab.replace(f"hosts={spec.hosts}", f"hosts={spec.hosts + num_dedicated_servers}")
    with lab_if_any(lab) as hosts, console.status(f"{', '.join(request.ways)}: starting") as status:

        def show(rank: int, values: dict[str, str]) -> None:
            if rank == 0 and "doing" in values:
                status.update(f"{', '.join(request.ways)}: {values['doing']}")

        chosen = {"workers": workers + num_dedicated_servers} if hosts is None else {"lab": hosts}
        return dict(launch(bench.measure, request, watch=show, **chosen)[0])


def _table(results: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=f"{title}: median ms a step", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    first = next(iter(results[0]["bytes_sent"]))
    table.caption = f"× is how many times as fast as {first}; % of the speed without any exchange"
    for heading in ("", "ms", "%", "×", "sent", "stale"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=bool(heading), overflow="fold")
    for result in results:
        solo_s, first_s = results[0]["seconds"]["solo"], results[0]["seconds"][first]
        for way, seconds in result["seconds"].items():
            if way == "solo":
                if result is results[0]:
                    table.add_row("no exchange", f"{seconds * 1e3:.2f}", "100%")
                continue
            ages = {int(age): count for age, count in result["staleness"].get(way, {}).items()}
            mean = f"{sum(a * n for a, n in ages.items()) / sum(ages.values()):.1f}" if ages else ""
            sent = format_size(round(result["bytes_sent"][way])) if way in result["bytes_sent"] else ""
            table.add_row(
                way, f"{seconds * 1e3:.2f}", f"{solo_s / seconds:.0%}", f"{first_s / seconds:.2f}", sent, mean
            )
    return table
