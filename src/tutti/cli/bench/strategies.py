"""`tutti bench strategies`: training steps under several strategies, and the cost of a slow worker."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tutti.bench.models import MODEL_NAMES, check_model_names
from tutti.cli.bench.output import plain_table, show_activity
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.lab_option import check_workers_or_lab, describe_hosts, launch_arguments, open_lab
from tutti.cli.options import JsonFile, LabText, NumRounds
from tutti.cli.strategy_cell import StrategyCell
from tutti.cluster import format_size
from tutti.errors import ConfigError

if TYPE_CHECKING:
    from tutti.bench.strategies import StrategyBenchmark

_STRATEGIES = "native,ps:bsp,ps:ssp=3,ps:async,ps:async,locks,ps:bsp,servers=1"
_DEFAULT_WORKERS = 2

_Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|MODULE:FACTORY",
        help=f"Model to train: {', '.join(MODEL_NAMES)}, or a function that returns a tutti.recipes.Recipe.",
    ),
]
_Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        "-n",
        min=2,
        help="Number of training workers on this machine. Dedicated servers are added on top.",
        show_default=str(_DEFAULT_WORKERS),
    ),
]
_PostLocalSGD = Annotated[
    int | None,
    typer.Option(
        "--post-local-sgd",
        metavar="STEPS",
        min=1,
        help="Also time DDP, and torch's PostLocalSGD that averages every STEPS steps.",
    ),
]


def strategies(
    model: _Model = "mnist-mlp",
    lab: LabText = None,
    workers: _Workers = None,
    texts: Annotated[
        str, typer.Option("--strategies", help="Comma-separated strategies to time, such as native,ps:ssp=3.")
    ] = _STRATEGIES,
    post_local_sgd: _PostLocalSGD = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples per worker and step. Default: the model's own.")
    ] = None,
    slow: Annotated[
        float, typer.Option(min=1.0, help="Slow the last worker down: its computation takes this many times as long.")
    ] = 1.0,
    rounds: NumRounds = 7,
    json_file: JsonFile = None,
) -> None:
    """Time training steps under several strategies, beside workers that exchange nothing.

    A strategy with dedicated servers is timed in a run of its own, with additional ranks.

    A strategy that communicates once in 16 steps is timed over 16 steps.
    """
    from tutti.bench.strategies import StrategyBenchmark
    from tutti.strategies import parse

    check_writable(json_file)
    check_workers_or_lab(workers, lab)
    check_model_names([model])
    by_servers: dict[int, list[str]] = {}
    for text in parse_strategies(texts):
        # Strategies without servers are timed in one run, interleaved: what disturbs the machine then disturbs all
        # alike.
        by_servers.setdefault(parse(text).num_dedicated_servers, []).append(text)
    console = Console()
    results: list[dict[str, Any]] = []
    for num_servers, group in by_servers.items():
        # Servers are ranks that do not train: such a run can hold one strategy only.
        for names in [tuple(group)] if not num_servers else [(name,) for name in group]:
            benchmark = StrategyBenchmark(model, names, rounds, slow, None if num_servers else post_local_sgd, batch)
            results.append(_measure(benchmark, workers or _DEFAULT_WORKERS, lab, num_servers, console))
    console.print(_table(results, f"{model}, {describe_hosts(workers or _DEFAULT_WORKERS, lab)}"))
    if slow > 1:
        console.print(f"The last worker's computation takes {slow:g} times as long as that of the others.")
    write_json(json_file, {"lab": lab, "runs": results})


def parse_strategies(text: str) -> list[str]:
    """Parse a comma-separated list of strategies to time; each once, in canonical spelling.

    A strategy that averages every so many seconds cannot be timed: its period must be a number of steps.
    """
    from tutti.strategies import parse

    # By canonical spelling, so that one strategy written in two ways is timed once.
    texts = list(dict.fromkeys(str(parse(part)) for part in split_strategies(text)))
    if not texts:
        raise ConfigError("--strategies needs one or more, such as native,ps:bsp.")
    if timed := [text for text in texts if parse(text).steps_per_exchange is None]:
        raise ConfigError(f"whole blocks are timed: give '{timed[0]}' a number of steps, such as every=16.")
    return texts


def split_strategies(text: str) -> list[str]:
    """Split a list of strategies at its commas. A part that is no strategy's name is an option of the one before."""
    from tutti.strategies import is_strategy_name

    texts: list[str] = []
    for part in text.split(","):
        # A comma separates strategies and also the options of one: "ps:ssp=3,servers=1" is one, "ring,onebit" two.
        name = part.strip().partition(":")[0].partition("+")[0]
        if texts and not is_strategy_name(name) and ":" in texts[-1]:
            texts[-1] += f",{part.strip()}"
        elif part.strip():
            texts.append(part.strip())
    return texts


def _measure(
    benchmark: "StrategyBenchmark", workers: int, lab: str | None, num_servers: int, console: Console
) -> dict[str, Any]:
    """Run one benchmark on workers and servers; a lab gets one more host for every server."""
    from tutti.bench.strategies import measure
    from tutti.launch import launch
    from tutti.launch.lab.lab import LabSpec

    if lab is not None and num_servers:
        spec = LabSpec.parse(lab)
        if spec.ranks_per_host > 1 or len(set(spec.rates)) > 1:
            raise ConfigError("dedicated servers need a lab with one rank per host and one rate.")
        # One rank per host, so that a server has a network card of its own, as in a real cluster.
        lab = str(replace(spec, rates=spec.rates[:1] * (spec.hosts + num_servers)))
    names = ", ".join(benchmark.strategies)
    with open_lab(lab) as hosts, console.status(f"{names}: starting") as status:
        chosen = launch_arguments(workers + num_servers, hosts)
        return dict(launch(measure, benchmark, watch=show_activity(status, f"{names}: "), **chosen)[0])


def _table(results: list[dict[str, Any]], title: str) -> Table:
    """All runs in one table, relative to workers that exchange nothing and to the first strategy."""
    first = next(iter(results[0]["bytes_sent"]))
    table = plain_table(f"{title}: median milliseconds per step")
    table.caption = (
        f"%: speed relative to no exchange; ×: relative to {first}; sent: bytes per step; stale: mean age in steps"
    )
    for heading in ("", "ms", "%", "×", "sent", "stale"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=bool(heading))
    # Those of the first run are the reference of all rows: other runs have other ranks.
    solo_s, first_s = results[0]["seconds"]["solo"], results[0]["seconds"][first]
    table.add_row("no exchange", f"{solo_s * 1e3:.2f}", "100%")
    for result in results:
        for name, seconds in result["seconds"].items():
            if name == "solo":
                continue
            sent = format_size(round(result["bytes_sent"][name])) if name in result["bytes_sent"] else ""
            speeds = f"{solo_s / seconds:.0%}", f"{first_s / seconds:.2f}"
            table.add_row(
                StrategyCell(name), f"{seconds * 1e3:.2f}", *speeds, sent, _mean_age(result["staleness"].get(name, {}))
            )
    return table


def _mean_age(counts: dict[Any, int]) -> str:
    """The mean age of updates, from the number of updates of each age; empty where there are none."""
    if not counts:
        return ""
    return f"{sum(int(age) * count for age, count in counts.items()) / sum(counts.values()):.1f}"
