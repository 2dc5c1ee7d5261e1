"""`tutti run`: a script in several processes."""

import os
from pathlib import Path
from typing import Annotated

import typer

from tutti.errors import ConfigError
from tutti.launch.local import run_script
from tutti.strategies import parse


def run(
    script: Annotated[str, typer.Argument(help="A Python script that calls tutti.init() and tutti.distribute().")],
    args: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.")] = None,
    workers: Annotated[int | None, typer.Option("--workers", "-n", help="Processes; one per core by default.")] = None,
    strategy: Annotated[str | None, typer.Option(help="How replicas stay together, whatever the script says.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds to wait for a rank before giving up.")] = None,
) -> None:
    """Run SCRIPT in several processes on this machine.

    Options come before the script; what comes after it is the script's.
    """
    if not Path(script).is_file():
        raise ConfigError(f"there is no script '{script}' in {Path.cwd()}.")
    if timeout is not None and not timeout > 0:
        raise ConfigError(f"--timeout takes a number of seconds above 0, got {timeout:g}.")
    environment = {}
    if strategy is not None:
        environment["TUTTI_STRATEGY"] = str(parse(strategy))
    if timeout is not None:
        environment["TUTTI_TIMEOUT"] = str(timeout)
    if workers is None:
        workers = len(os.sched_getaffinity(0))
    run_script([script, *(args or [])], workers, environment)
