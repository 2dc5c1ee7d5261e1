"""The cluster that a simulation's options describe."""

from dataclasses import replace
from typing import Annotated

import typer

from tutti.cluster import PRESETS, Cluster, Jitter
from tutti.errors import ConfigError

ClusterText = Annotated[
    str,
    typer.Option(
        "--cluster", metavar="NAME|FILE", help=f"{', '.join(PRESETS)}, or a TOML file; see `tutti simulate clusters`."
    ),
]
Slow = Annotated[
    list[str] | None,
    typer.Option("--slow", metavar="RANK=FACTOR", help="3=2.0: rank 3 takes twice as long; repeatable."),
]
JitterSpread = Annotated[
    float | None,
    typer.Option("--jitter", help="Spread of the time a step computes, log-normal: 0.1 is about 10 %."),
]


def cluster_of(text: str, slow: list[str] | None, jitter: float | None) -> Cluster:
    """A preset or a file's cluster, made as uneven as the options say."""
    cluster = Cluster.load(text)
    cluster = replace(cluster, slow={**cluster.slow, **dict(map(_rank_and_factor, slow or []))})
    return cluster if jitter is None else replace(cluster, jitter=Jitter(jitter))


def _rank_and_factor(text: str) -> tuple[int, float]:
    rank, _, factor = text.partition("=")
    try:
        return int(rank), float(factor)
    except ValueError:
        raise ConfigError(f"--slow takes RANK=FACTOR, such as 3=2.0, got '{text}'.") from None
