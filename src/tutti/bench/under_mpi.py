"""Run a benchmark's workers under mpirun, so that Open MPI can be timed beside the others in the same processes."""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from tutti.errors import WorkerFailed
from tutti.launch import command, launch
from tutti.launch.interpreter import main_of
from tutti.launch.lab.lab import Lab, address
from tutti.launch.mpirun import available, mpirun, mpirun_in_lab
from tutti.launch.supervisor_pipe import Watcher

_GRACE_S = 10.0
"""Seconds that mpirun has to end its ranks and clear its files, before it is killed."""


def communicator() -> Any:
    """Return MPI's world communicator if mpirun started this process; None otherwise."""
    if "OMPI_COMM_WORLD_SIZE" not in os.environ or not available():
        return None
    from mpi4py import MPI

    return MPI.COMM_WORLD


def run(
    function: Callable[..., Any],
    *args: Any,
    workers: int | None = None,
    on: Lab | None = None,
    watch: Watcher | None = None,
) -> Any:
    """Run `function(*args)` on several ranks, under mpirun if it is installed, and return rank 0's result.

    The function belongs to a module; its arguments and its result are JSON. With a lab, ranks run on its hosts.
    """
    if workers == 1 or not available():  # Without MPI the benchmark has one candidate less.
        return launch(function, *args, workers=workers, on=on, watch=watch)[0]
    workers = workers or (on.spec.num_workers if on is not None else 2)
    with tempfile.TemporaryDirectory(prefix="tutti-bench-") as folder:
        result = Path(folder) / "result.json"
        task = json.dumps([function.__module__, function.__name__, args, str(result)])
        # Ranks divide the cores, as Tutti's launcher has it. Variables that the user has set come last and win.
        threads = max(1, len(os.sched_getaffinity(0)) // workers)
        environment = {"OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "default", **os.environ}
        # Before a rank imports anything, it asks the kernel to end it together with mpirun.
        bind_to_parent = [sys.executable, "-I", "-S", command.__file__, "0"]
        argv = [*bind_to_parent, *main_of("tutti.bench.under_mpi"), task]
        with nullcontext(mpirun(workers, argv)) if on is None else _in_lab(on, argv) as mpirun_argv:
            status = _run(mpirun_argv, environment)
        # A rank that exits early without an error leaves no result.
        if status or not result.exists():
            raise WorkerFailed(0, f"mpirun exited with status {status}", status=status or 1)
        return json.loads(result.read_text())


def _run(argv: list[str], environment: dict[str, str]) -> int:
    """Run a command, and return its exit status. If this is interrupted, the command gets time to clean up."""
    process = subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL)
    try:
        # Ended by the command, or by the user's interrupt.
        return process.wait()
    except BaseException:  # Also a KeyboardInterrupt: no rank may outlive this call.
        process.terminate()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            # Ended by the kernel: nothing outlives SIGKILL.
            process.wait()
        raise


def _in_lab(lab: Lab, argv: list[str]) -> AbstractContextManager[list[str]]:
    hosts = lab.placement.hosts
    names = [host.namespace for host in hosts if host.namespace is not None]
    addresses = [address(number) for number in range(len(hosts))]
    return mpirun_in_lab(names, addresses, argv, ranks_per_host=lab.spec.ranks_per_host)


def main() -> None:
    """Run the function that `run` passed; the entry point of every rank under mpirun."""
    module, name, args, path = json.loads(sys.argv[1])
    value = getattr(importlib.import_module(module), name)(*args)
    if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
        Path(path).write_text(json.dumps(value))
