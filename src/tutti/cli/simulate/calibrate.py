"""`tutti simulate --calibrate`: measure this machine or a lab, and write the cluster that simulates it.

This module imports torch; the command imports it when it runs.
"""

import shlex
from pathlib import Path

from rich.console import Console

from tutti.cli.bench.output import show_activity
from tutti.cli.lab_option import check_workers_or_lab, describe_hosts, launch_arguments, open_lab
from tutti.cluster import Cluster
from tutti.errors import ConfigError
from tutti.launch import launch
from tutti.recipes import recipe
from tutti.simulation.runs.calibrate import cluster_of, measure


def calibrate(recipe_text: str, path: Path, workers: int | None, lab: str | None) -> Cluster:
    """Measure steps of a recipe and the links between ranks, and write a cluster with the same times to `path`.

    Args:
        recipe_text: a recipe's name, or "module:factory".
    """
    _check(path, workers, lab)
    recipe(recipe_text)  # Refuses an unknown recipe and a factory that fails, before ranks are started.
    console = Console()
    with open_lab(lab) as hosts:
        # With two workers there is a link to measure; with one, only its computing time.
        workers = hosts.spec.num_workers if hosts is not None else workers or 2
        where = describe_hosts(workers, hosts)
        with console.status(f"{where}: starting") as status:
            show = show_activity(status, f"{where}: ")
            measured = launch(measure, recipe_text, watch=show, **launch_arguments(workers, hosts))[0]
    cluster = cluster_of(measured, "loopback" if hosts is None else f"lab {hosts.spec}")
    path.write_text(cluster.to_toml())
    print(f"{cluster}\n\nwritten to {path}. Simulate it with:")
    print(f"tutti simulate {shlex.quote(recipe_text)} --cluster {shlex.quote(str(path))} --workers {workers}")
    return cluster


def _check(path: Path, workers: int | None, lab: str | None) -> None:
    """Refuse arguments that cannot be measured or written, before anything is measured."""
    check_workers_or_lab(workers, lab)
    if workers is not None and workers < 1:
        raise ConfigError(f"workers must be 1 or more, got {workers}.")
    if path.suffix != ".toml":
        raise ConfigError(f"--calibrate takes a file that ends in .toml, got '{path}'.")
    if not path.parent.is_dir():
        raise ConfigError(f"--calibrate: there is no folder {path.parent}.")
