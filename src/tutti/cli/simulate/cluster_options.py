"""The options of a simulation that describe its cluster."""

from dataclasses import replace
from typing import Annotated

import typer

from tutti.cluster import Cluster, Jitter
from tutti.errors import ConfigError

Slow = Annotated[
    list[str] | None,
    typer.Option(
        "--slow",
        metavar="RANK=FACTOR",
        help="Slow a rank down: 3=2.0 doubles the computing time of rank 3. Can be given several times.",
    ),
]
JitterSpread = Annotated[
    float | None,
    typer.Option("--jitter", help="Log-normal spread of the computing time of a step; 0.1 is about 10 %."),
]


def load_cluster(text: str, slow: list[str] | None, jitter: float | None) -> Cluster:
    """Load a predefined cluster or a file, and apply `--slow` and `--jitter`."""
    cluster = Cluster.load(text)
    # Options of the command line overrule the file, rank by rank.
    cluster = replace(cluster, slow={**cluster.slow, **dict(map(_rank_and_factor, slow or []))})
    return cluster if jitter is None else replace(cluster, jitter=Jitter(jitter))


def _rank_and_factor(text: str) -> tuple[int, float]:
    rank, _, factor = text.partition("=")
    try:
        return int(rank), float(factor)
    except ValueError:
        raise ConfigError(f"--slow takes RANK=FACTOR, such as 3=2.0, got '{text}'.") from None
