"""The summary of a simulated run: its contents and its table."""

from statistics import fmean
from typing import Any

from rich.table import Table

from tutti.cli.progress import describe_rate, format_bytes, strategy_rows
from tutti.cluster import format_time
from tutti.simulation.runs.simulate import Simulation

_NUM_LINKS = 4

_USES = {"computing": "busy_s", "communicating": "communicating_s", "waiting for others": "waiting_s"}
"""The states of a rank, and the keys of a summary that hold their seconds."""


def traffic(simulation: Simulation) -> dict[str, Any]:
    """Entries of the summary: mean loss, virtual time, the time account of every rank, and the traffic of links."""
    return {
        "loss": fmean(result.loss for result in simulation.results if result is not None),
        "seconds": simulation.seconds,
        "num_messages": simulation.num_messages,
        "ranks": [{key: getattr(rank, key) for key in _USES.values()} for rank in simulation.ranks],
        "links": {
            name: {"num_bytes": link.num_bytes, "busy_s": link.busy_s} for name, link in simulation.links.items()
        },
        "lost": simulation.lost,
        "chaos": simulation.chaos,
    }


def summary_table(summary: dict[str, Any]) -> Table:
    """The summary as a table of at most 80 columns."""
    made = Table(show_header=False)
    # A run of few steps takes much of its time otherwise: models are made equal first, and exchanged at the end.
    other_s = max(0.0, summary["seconds"] - summary["steps"] * summary["step_s"])
    for label, value in (
        ("test accuracy", f"{summary['accuracy']:.2%} (target {summary['target']:.0%})"),
        ("learning rate", describe_rate(summary)),
        ("last loss", f"{summary['loss']:.4f}"),
        ("steps", f"{summary['steps']:,}, of {format_time(summary['step_s'])} on average"),
        ("virtual time", format_time(summary["seconds"])),
        ("of it start, evaluation, finish", format_time(other_s)),
        ("real time of the simulation", format_time(summary["wall_s"])),
        ("samples/s in virtual time", f"{summary['samples'] / summary['seconds']:,.0f}"),
        ("messages", f"{summary['num_messages']:,}"),
        ("bytes sent per worker", format_bytes(summary["bytes_sent"])),
        *((label, _shares(summary["ranks"], key)) for label, key in _USES.items()),
        *_busiest_links(summary),
        *strategy_rows(summary["strategy_metrics"]),
    ):
        made.add_row(label, value)
    return made


def _shares(ranks: list[dict[str, float]], key: str) -> str:
    """The mean share of the time over ranks, and the extreme one: the least for computing, else the most."""
    shares = [rank[key] / (sum(rank.values()) or 1.0) for rank in ranks]
    extreme = min if key == "busy_s" else max
    worst = extreme(range(len(shares)), key=shares.__getitem__)
    word = "least" if key == "busy_s" else "most"
    return f"mean {fmean(shares):.1%}, {word} {shares[worst]:.1%} (rank {worst})"


def _busiest_links(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return rows of the links that were in use longest, the first of them with the label of all."""
    links = sorted(summary["links"].items(), key=lambda item: -item[1]["busy_s"])
    label = "busiest links" if len(links) > 1 else "busiest link"
    rows = []
    for name, link in links[:_NUM_LINKS]:
        share = link["busy_s"] / summary["seconds"]
        rows.append((label, f"{name}: {format_bytes(link['num_bytes'])}, in use {share:.1%}"))
        label = ""
    return rows
