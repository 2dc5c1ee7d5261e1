"""`tutti run`: a script in several processes."""

import os
from pathlib import Path
from typing import Annotated

import typer

from tutti.cli.lab_option import open_lab
from tutti.cli.options import CheckpointEvery, Grace, LabText, checked_every
from tutti.cluster import parse_duration
from tutti.errors import ConfigError, WorkerFailed

_USAGE_ERROR = 2
"""The exit status with which argparse and click refuse an argument."""


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="Python script that calls tutti.init() and tutti.distribute().")],
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", "-n", help="Number of processes. Default: one per core.")
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(help="Synchronisation strategy, which overrides the script's own.")
    ] = None,
    timeout: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Time to wait for ranks to start: seconds, or 40s, 5m, 1h."),
    ] = None,
    checkpoint_every: CheckpointEvery = None,
    grace: Grace = None,
    lab: LabText = None,
    spawn: Annotated[
        bool,
        typer.Option(
            "--spawn", metavar="", help="Start each worker as a new Python process, instead of forking them from one."
        ),
    ] = False,
) -> None:
    """Run a script in several processes on this machine, or on the emulated hosts of a lab (see `tutti lab`).

    Options of `tutti run` come before the script. Everything after the script is passed to the script.

    Example: tutti run --workers 4 train.py --lr 0.1
    """
    if not Path(script).is_file():
        raise ConfigError(f"there is no script '{script}' in {Path.cwd()}.")
    from tutti.launch.local import run_script

    # Checked here, where a mistake is one message and not one for each worker.
    environment = {} if strategy is None else {"TUTTI_STRATEGY": _checked_strategy(strategy, workers)}
    environment |= _durations(TUTTI_TIMEOUT=timeout, TUTTI_GRACE=grace)
    if checkpoint_every is not None:
        environment["TUTTI_CHECKPOINT_EVERY"] = checked_every(checkpoint_every)
    if spawn:
        environment["TUTTI_START"] = "spawn"
    if workers is None and lab is None:
        # Not `os.cpu_count`: a container or `taskset` may allow fewer cores than the machine has.
        workers = len(os.sched_getaffinity(0))
    with open_lab(lab) as hosts:
        try:
            run_script([script, *(args or [])], workers, environment, hosts)
        except WorkerFailed as error:
            # All words after the script are the script's. One that it refuses and `tutti run` knows was probably meant
            # for `tutti run`.
            own = {name for parameter in context.command.params for name in parameter.opts}
            if error.status == _USAGE_ERROR and (late := own.intersection(args or [])):
                error.add_note(f"{', '.join(sorted(late))} was passed to the script: give it before {script}.")
            raise


def _durations(**texts: str | None) -> dict[str, str]:
    """The environment variables of durations that were given, in seconds."""
    return {
        name: str(parse_duration(text, f"--{name.removeprefix('TUTTI_').lower()}").total_seconds())
        for name, text in texts.items()
        if text is not None
    }


def _checked_strategy(text: str, workers: int | None) -> str:
    """The canonical spelling of a strategy, which must be possible with so many workers."""
    from tutti.strategies import parse

    parsed = parse(text)
    if workers is not None and workers > 1:
        parsed.check_size(workers)
    return str(parsed)
