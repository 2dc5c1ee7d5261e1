"""`tutti run`: a script in several processes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tutti.cli.lab_option import open_lab
from tutti.cli.options import CheckpointEvery, Grace, LabText, checked_every
from tutti.cli.run_options import (
    Arguments,
    ChaosText,
    Hosts,
    Listen,
    On,
    RestartsLimit,
    Script,
    Spawn,
    Start,
    StrategyText,
    Timeout,
    WorkersText,
)
from tutti.cluster import parse_duration
from tutti.errors import ConfigError, WorkerFailed

if TYPE_CHECKING:
    from tutti.launch.elastic_run import ElasticRun

_USAGE_ERROR = 2
"""The exit status with which argparse and click refuse an argument."""


def run(
    context: typer.Context,
    script: Script,
    args: Arguments = None,
    workers: WorkersText = None,
    strategy: StrategyText = None,
    timeout: Timeout = None,
    checkpoint_every: CheckpointEvery = None,
    grace: Grace = None,
    lab: LabText = None,
    hosts: Hosts = None,
    on: On = None,
    spawn: Spawn = False,
    start: Start = None,
    restarts: RestartsLimit = None,
    listen: Listen = None,
    chaos: ChaosText = None,
) -> None:
    """Run a script in several processes on this machine, on other hosts, or on the emulated hosts of a lab.

    Options of `tutti run` come before the script. Everything after the script is passed to the script.

    Examples: tutti run --workers 4 train.py --lr 0.1

    tutti run --hosts a:2,b:4 train.py
    """
    if not Path(script).is_file():
        raise ConfigError(f"there is no script '{script}' in {Path.cwd()}.")
    from tutti.launch.local import run_script

    # Checked here, where a mistake is one message and not one for each worker.
    options = {"start": start, "restarts": restarts, "chaos": chaos, "listen": listen}
    launcher = _launcher(lab, hosts, on)
    number = _number_of_workers(workers, {name: each for name, each in options.items() if each is not None}, lab)
    environment = {} if strategy is None else {"TUTTI_STRATEGY": checked_strategy(strategy, number)}
    environment |= durations(TUTTI_TIMEOUT=timeout, TUTTI_GRACE=grace)
    if checkpoint_every is not None:
        environment["TUTTI_CHECKPOINT_EVERY"] = checked_every(checkpoint_every)
    if spawn:
        environment["TUTTI_START"] = "spawn"
    if number is None and lab is None and launcher in (None, "local"):
        # Not `os.cpu_count`: a container or `taskset` may allow fewer cores than the machine has.
        number = len(os.sched_getaffinity(0))
    with open_lab(lab) as opened, naming_late_options(context, script, args):
        run_script([script, *(args or [])], number, environment, opened or launcher)


def _launcher(lab: str | None, hosts: str | None, on: str | None) -> str | None:
    """Return the launcher and its options, if they are not those of the lab; `ConfigError` for two launchers."""
    given = {"--lab": lab, "--hosts": hosts, "--on": on}
    names = [name for name, text in given.items() if text is not None]
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(names)} each say where workers are started: give one of them.")
    return on if hosts is None else f"ssh:{hosts}"


@contextmanager
def naming_late_options(context: typer.Context, script: str, args: list[str] | None) -> Iterator[None]:
    """Add to the error of a script that refuses an option which was meant for the command itself."""
    try:
        yield
    except WorkerFailed as error:
        # All words after the script are the script's. One that it refuses and the command knows was probably meant for
        # the command.
        own = {name for parameter in context.command.params for name in parameter.opts}
        if error.status == _USAGE_ERROR and (late := own.intersection(args or [])):
            error.add_note(f"{', '.join(sorted(late))} was passed to the script: give it before {script}.")
        raise


def _number_of_workers(workers: str | None, options: dict[str, Any], lab: str | None) -> "int | ElasticRun | None":
    """Return how many workers to start, or how they may come and go if `--workers` is MIN:MAX.

    Args:
        options: those of `ElasticRun` that were given.
        lab: the text of the lab, if there is one.
    """
    from tutti.launch.chaos import Chaos
    from tutti.launch.elastic_run import ElasticRun, parse_workers
    from tutti.launch.lab.lab import LabSpec

    number = parse_workers(workers, "--workers")
    if not isinstance(number, ElasticRun):
        if options:
            names = ", ".join(f"--{name}" for name in options)
            raise ConfigError(f"{names} needs a number of workers that may change: --workers MIN:MAX.")
        return number
    spec = None if lab is None else LabSpec.parse(lab)
    if spec is not None and (useless := [f"--{name}" for name in ("start", "listen") if name in options]):
        raise ConfigError(
            f"{', '.join(useless)} has no effect in a lab, which has a number of places, and which other hosts do not "
            "reach: leave it out."
        )
    if "chaos" in options:
        options = {**options, "chaos": Chaos.parse(options["chaos"])}
    elastic = replace(number, **options)
    if elastic.chaos is not None:
        started, hosts = (elastic.num_started, 0) if spec is None else (spec.num_workers, spec.hosts)
        elastic.chaos.check(started, elastic.restarts, hosts)
    return elastic


def durations(**texts: str | None) -> dict[str, str]:
    """The environment variables of durations that were given, in seconds."""
    return {
        name: str(parse_duration(text, f"--{name.removeprefix('TUTTI_').lower()}").total_seconds())
        for name, text in texts.items()
        if text is not None
    }


def checked_strategy(text: str, workers: "int | ElasticRun | None") -> str:
    """The canonical spelling of a strategy, which must be possible with every number of workers that there may be."""
    from tutti.launch.elastic_run import ElasticRun
    from tutti.strategies import parse

    parsed = parse(text)
    if isinstance(workers, ElasticRun):
        numbers = range(workers.minimum, workers.maximum + 1)
    else:
        numbers = range(workers or 1, (workers or 1) + 1)
    for number in numbers:
        if number > 1:
            parsed.check_size(number)
    return str(parsed)
