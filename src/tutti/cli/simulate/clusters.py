"""`tutti simulate clusters`: what to simulate on, in words."""

from typing import Annotated

import typer

from tutti.cluster import PRESETS, Cluster


def clusters(
    which: Annotated[
        str | None, typer.Argument(metavar="NAME|FILE", help="One of them, or a TOML file; all by default.")
    ] = None,
    toml: Annotated[
        bool, typer.Option("--toml", help="Print a file instead, to change and to give to --cluster.")
    ] = False,
) -> None:
    """Describe the clusters that --cluster knows by name, or the one in a file."""
    found = list(PRESETS.values()) if which is None else [Cluster.load(which)]
    print("\n\n".join(cluster.to_toml().rstrip() if toml else str(cluster) for cluster in found))
