"""Worker process: runs a script with its arguments, a function that comes in an open file, or the store of a run."""

import os
import pickle
import runpy
import select
import signal
import sys
import traceback
from multiprocessing import spawn
from types import TracebackType
from typing import Any

from tutti.errors import ConfigError, NonFiniteLoss, RankLost, TooFewWorkers, TrainingEnded
from tutti.launch.command import die_with
from tutti.launch.supervisor_pipe import IMPORTING, PARENT, Failure, SupervisorPipe

_STARTERS = (
    "tutti.simulation.rank_thread",
    "tutti.simulation.runs.simulate",
    "tutti.simulation.runs.elastic.launcher",
)
"""Modules, beside this one, whose frames come first in a traceback: they start the user's code."""


def main() -> None:
    """Run what the arguments say, in a process that a supervisor or its fork server started.

    Arguments: a script with its own arguments; `--function FILE`; or `--store ADDRESS PORT FILE`. A file is the number
    of an open one. The result or the failure goes to the supervisor.
    """
    # First of all: a worker whose parent is gone already must not run on alone.
    die_with(int(os.environ[PARENT]))
    if sys.argv[1] == "--store":
        _serve_store(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    pipe = SupervisorPipe()
    try:
        if sys.argv[1] == "--function":
            pipe.result(_run_function(int(sys.argv[2])))
        else:
            _run_script(sys.argv[1:])
    except BaseException as error:
        sys.stdout.flush()
        # `sys.exit` in a script is its own end: the interpreter makes the status of it, and prints its message.
        if isinstance(error, SystemExit):
            raise
        if isinstance(error, TrainingEnded):  # It came too late to help, and nobody misses it.
            print(f"tutti: {error}", file=sys.stderr, flush=True)
            os._exit(0)
        pipe.failed(describe_failure(error))
        sys.stderr.flush()
        _finish_checkpoints()
        # Not through the interpreter's own exit: threads of a broken run must not hold it up.
        os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def _finish_checkpoints() -> None:
    """Let checkpoints that were taken before the failure reach the disk; the supervisor ends that after its notice."""
    if (background := sys.modules.get("tutti.checkpoint.background")) is not None:
        background.wait_for_all()


def _run_script(argv: list[str]) -> None:
    """Run a script as `python SCRIPT ARGUMENTS` would."""
    sys.argv = argv
    # As `python script.py` sets it; this process was started with -c, where it is the working directory.
    sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
    runpy.run_path(argv[0], run_name="__main__")


def _run_function(file: int) -> Any:
    """Call the function that `launch` pickled into an open file, and return its result."""
    with os.fdopen(file, "rb") as source:
        preparation = pickle.load(source)
        # The main module of the caller is imported here under another name, so that the function is found. Its call of
        # `launch` at top level must not start workers of its own.
        os.environ[IMPORTING] = "1"
        try:
            spawn.prepare(preparation)
            function, args = pickle.load(source)
        finally:
            del os.environ[IMPORTING]
    return function(*args)


def _serve_store(address: str, port: int, listener: int) -> None:
    """Serve the store through which ranks meet, on a socket that listens already, until this process is killed."""
    for number in (signal.SIGTERM, signal.SIGUSR1):  # As sent to all processes of a job, which may still need it.
        signal.signal(number, signal.SIG_IGN)
    connections = select.poll()  # select.select takes no file whose number is 1024 or more.
    connections.register(listener, select.POLLIN)
    # Ended by the first rank that connects, or by the kernel with the parent.
    connections.poll()  # Nobody may ever come: a script without torch does not wait for its import.
    from tutti.launch.store import serve

    store = serve(address, port, listener)
    while True:
        # Ended by the kernel, which kills this process with its parent.
        signal.pause()
        assert store is not None  # Its threads serve as long as it is there.


def describe_failure(error: BaseException) -> Failure:
    """Describe an error of a worker's own code for the supervisor, with the traceback from the user's code on."""
    trace = _without_starters(error.__traceback__)
    text = "".join(traceback.format_exception(type(error), error, trace))
    # Every rank raises `NonFiniteLoss`; the ones whose own loss was finite only follow.
    knock_on = isinstance(error, RankLost) or (isinstance(error, NonFiniteLoss) and error.elsewhere)
    return Failure(
        f"failed: {type(error).__name__}: {error}",
        text,
        knock_on,
        is_mistake=isinstance(error, ConfigError),
        ends_run=isinstance(error, TooFewWorkers),
    )


def _without_starters(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the user's code on, without how it was started."""
    # A module that is not imported has no frame, so none is imported for this: they import torch.
    files = {__file__, *(sys.modules[name].__file__ for name in _STARTERS if name in sys.modules)}
    while trace is not None and (
        trace.tb_frame.f_code.co_filename in files or "runpy" in trace.tb_frame.f_code.co_filename
    ):
        trace = trace.tb_next
    return trace
