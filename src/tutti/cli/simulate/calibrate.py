"""`tutti simulate --calibrate`: write down the cluster that behaves like this machine, or like a lab."""

import shlex
from pathlib import Path

from rich.console import Console

from tutti.cli.place import check_one_place, described, lab_if_any
from tutti.cluster import Cluster
from tutti.errors import ConfigError
from tutti.launch import launch
from tutti.recipes import recipe
from tutti.simulation.runs.calibrate import cluster_of, measure


def calibrate(recipe_name: str, path: Path, workers: int | None, lab: str | None) -> Cluster:
    """Measure steps of a recipe and the links between ranks; write the cluster that does the same to `path`."""
    _check(path, workers, lab)
    made, console = recipe(recipe_name), Console()
    with lab_if_any(lab) as hosts:
        workers = hosts.spec.num_workers if hosts is not None else workers or 2
        where = described(workers, hosts)
        with console.status(f"{where}: starting") as status:

            def show(rank: int, values: dict[str, str]) -> None:
                status.update(f"{where}: {values['doing']}")

            chosen = {"workers": workers} if hosts is None else {"lab": hosts}
            found = launch(measure, made.name, watch=show, **chosen)[0]
    cluster = cluster_of(found, "loopback" if hosts is None else f"lab {hosts.spec}")
    path.write_text(cluster.to_toml())
    print(f"{cluster}\n\nwritten to {path}; simulate with:")
    print(f"tutti simulate {made.name} --cluster {shlex.quote(str(path))} --workers {workers}")
    return cluster


def _check(path: Path, workers: int | None, lab: str | None) -> None:
    """Refuse what cannot be measured or written, before it is measured."""
    check_one_place(workers, lab)
    if workers is not None and workers < 1:
        raise ConfigError(f"workers must be 1 or more, got {workers}.")
    if path.suffix != ".toml":
        raise ConfigError(f"--calibrate takes a file that ends in .toml, got '{path}'.")
    if not path.parent.is_dir():
        raise ConfigError(f"--calibrate: there is no folder {path.parent}.")
