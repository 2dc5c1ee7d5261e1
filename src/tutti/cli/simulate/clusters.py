"""`tutti simulate clusters`: descriptions of the predefined clusters."""

from typing import Annotated

import typer

from tutti.cluster import PRESETS, Cluster


def clusters(
    which: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME|FILE", help="Name of a predefined cluster, or a TOML file. Default: all predefined ones."
        ),
    ] = None,
    toml: Annotated[
        bool, typer.Option("--toml", metavar="", help="Print TOML instead, which --cluster accepts as a file.")
    ] = False,
) -> None:
    """Describe the predefined clusters, or the one in a file."""
    clusters = list(PRESETS.values()) if which is None else [Cluster.load(which)]
    print("\n\n".join(cluster.to_toml().rstrip() if toml else str(cluster) for cluster in clusters))
