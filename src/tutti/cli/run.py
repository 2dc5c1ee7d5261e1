"""`tutti run`: a script in several processes."""

import os
from pathlib import Path
from typing import Annotated

import typer

from tutti.cli.place import lab_if_any
from tutti.cluster import parse_duration
from tutti.errors import ConfigError
from tutti.launch.local import run_script
from tutti.strategies import parse


def run(
    script: Annotated[str, typer.Argument(help="A Python script that calls tutti.init() and tutti.distribute().")],
    args: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.")] = None,
    workers: Annotated[int | None, typer.Option("--workers", "-n", help="Processes; one per core by default.")] = None,
    strategy: Annotated[str | None, typer.Option(help="How replicas stay together, whatever the script says.")] = None,
    timeout: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Time to wait for a rank before giving up: seconds, or 40s, 5m, 1h."),
    ] = None,
    lab: Annotated[
        str | None, typer.Option(metavar="SPEC", help="Run on hosts made for it, such as hosts=4,rate=100mbit,ranks=1.")
    ] = None,
) -> None:
    """Run SCRIPT in several processes on this machine, or on hosts of a lab (see `tutti lab`).

    Options come before the script; what comes after it is the script's.
    """
    if not Path(script).is_file():
        raise ConfigError(f"there is no script '{script}' in {Path.cwd()}.")
    environment = {}
    if strategy is not None:
        parsed = parse(strategy)
        if workers is not None and workers > 1:
            parsed.check_size(workers)
        environment["TUTTI_STRATEGY"] = str(parsed)
    if timeout is not None:
        environment["TUTTI_TIMEOUT"] = str(parse_duration(timeout, "--timeout").total_seconds())
    if workers is None and lab is None:
        workers = len(os.sched_getaffinity(0))
    with lab_if_any(lab) as hosts:
        run_script([script, *(args or [])], workers, environment, hosts)
