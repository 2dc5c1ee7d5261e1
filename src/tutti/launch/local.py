"""Local launches: a function or a script in several processes on this machine, or on the hosts of a lab."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from tutti.cluster import Duration, parse_duration
from tutti.errors import ConfigError
from tutti.launch.elastic_run import ElasticRun, Workers, parse_workers
from tutti.launch.joined_run import JoinedRun
from tutti.launch.lab.lab import Lab
from tutti.launch.lab.placement import here
from tutti.launch.launcher import Launcher
from tutti.launch.local_launcher import LocalLauncher, in_lab
from tutti.launch.pickling import packed_call
from tutti.launch.registry import make_launcher
from tutti.launch.start import Program, modules_for
from tutti.launch.supervisor import Supervisor
from tutti.launch.supervisor_pipe import IMPORTING, PIPE_VARIABLE, Watcher
from tutti.simulation import guard


def launch(
    function: Callable[..., Any],
    *args: Any,
    workers: Workers = None,
    timeout: Duration | None = None,
    transport: str | None = None,
    watch: Watcher | None = None,
    on: Lab | str | None = None,
) -> list[Any]:
    """Run `function(*args)` in `workers` processes, on this machine by default; return their results by rank.

    Args:
        function: calls `tutti.init()` itself. It and its arguments go to workers by name where they can be imported, as
            with `multiprocessing`; lambdas, local functions and what a notebook defines go by value.
        workers: 2 by default; in a lab, as many as it has places for, and no other number. A pair such as (2, 8), or
            "2:8", is the fewest and the most: 8 are started, lost ones are replaced, and training goes on with fewer.
            `tutti.launch.elastic_run.ElasticRun` has more options.
        timeout: how long workers wait for the others to start: seconds, "40s" or a timedelta.
        transport: as for `tutti.init`.
        watch: called with a rank and what it reported by `tutti.launch.supervisor_pipe.SupervisorPipe.progress`.
        on: where, if not here: the lab that `tutti.lab(...)` has made, or a launcher as for `tutti run --on`, such as
            "ssh:a:2,b:4" for two workers on host a and four on host b.

    Raises `WorkerFailed` for the first worker that failed, after all others have stopped. A worker that called
    `tutti.launch.supervisor_pipe.SupervisorPipe.tolerate_loss` may fail: its result is None and the others go on.
    If all such workers are lost, that is a failure too. Where the number of workers may change, each may fail once the
    model is distributed, and results are by the number that the worker had: None for lost ones.

    In a worker that is still importing the script that called
    `launch`, the call returns an empty list at once, so that the script needs no `if __name__ == "__main__"`.
    """
    if is_importing():
        return []
    _refuse_in_worker()
    environment = {}
    if timeout is not None:
        # By variables, because `tutti.init` in the worker reads them: the function itself gets the caller's arguments
        # only.
        environment["TUTTI_TIMEOUT"] = str(parse_duration(timeout).total_seconds())
    if transport is not None:
        environment["TUTTI_TRANSPORT"] = transport
    return supervise(function, args, parse_workers(workers, "workers"), environment, watch, on).run()


def launch_by_value(function: Callable[..., Any], *args: Any, workers: Workers, watch: Watcher) -> list[Any]:
    """As `launch`, but workers do not import the caller's script: they get by value what it defines."""
    _refuse_in_worker()
    parsed = parse_workers(workers, "workers")
    program = Program(["--function"], packed_call(function, args, by_value=True))
    return Supervisor(program, _launcher(parsed, None), {}, watch, elastic=_elastic(parsed)).run()


def is_importing() -> bool:
    """Whether this process is a worker that imports the script in which a call stands, rather than runs it."""
    return IMPORTING in os.environ


def _refuse_in_worker() -> None:
    guard.refuse("tutti.launch")
    if PIPE_VARIABLE in os.environ:
        raise ConfigError(
            "launch was called inside a worker: workers cannot start workers. A script that calls launch is started "
            "with python; under tutti run or torchrun, call the function itself."
        )


def supervise(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    workers: int | ElasticRun | None,
    environment: dict[str, str],
    watch: Watcher | None = None,
    on: Lab | str | None = None,
) -> Supervisor:
    """Make the supervisor of a launch, with variables for its workers. Its `run` starts them."""
    program, elastic = Program(["--function"], packed_call(function, args)), _elastic(workers)
    return Supervisor(program, _launcher(workers, on), environment, watch, elastic=elastic)


def run_script(
    argv: Sequence[str],
    workers: int | ElasticRun | None,
    environment: dict[str, str],
    on: Lab | str | None = None,
    *,
    joins: JoinedRun | None = None,
) -> None:
    """Run a script with its arguments in `workers` processes; raise `WorkerFailed` for the first that failed.

    Args:
        workers: how many, or how they may come and go. In a lab, None or as many as it has places for.
        on: as for `launch`.
        joins: the run of another launcher, to which the workers are added.
    """
    program = Program(argv, modules=modules_for(argv[0]))
    launcher = _launcher(workers, on) if joins is None else LocalLauncher(here(joins.num_workers))
    supervisor = Supervisor(program, launcher, environment, elastic=_elastic(workers), joins=joins)
    supervisor.run()
    # The strategy may go on without a worker. Its script has failed all the same, and the exit status says so.
    if supervisor.failed_alone is not None:
        raise supervisor.failed_alone


def run_command(argv: Sequence[str], lab: Lab) -> None:
    """Run any command in every place of a lab; raise `WorkerFailed` for the first that failed."""
    Supervisor(Program(argv, is_command=True), LocalLauncher(lab.placement), {}).run()


def _launcher(workers: int | ElasticRun | None, on: Lab | str | None) -> Launcher:
    return in_lab(on, workers) if isinstance(on, Lab) else make_launcher(on or "local", workers)


def _elastic(workers: int | ElasticRun | None) -> ElasticRun | None:
    return workers if isinstance(workers, ElasticRun) else None
