"""Start worker processes: forked by a fork server that has imported torch, or spawned as new Python processes.

Both give a worker its own session, its environment, two output pipes, a supervisor pipe, and a process object with
`pid`, `returncode`, `poll` and `wait`. Forking saves each worker the import of torch and Tutti. A forked worker also
gets the working directory, umask, cores, resource limits, nice value and numbers of threads that a spawned one would
have. These differences remain:
- `ps` and `/proc/PID/cmdline` show the command line of the fork server, and the parent is the fork server;
- torch and the other modules of `Program.modules` are imported before the user's code runs. Environment variables that
  act at import and are set by the script have no effect;
- OpenMP's own default is one thread. So `omp_get_max_threads` says 1 in a thread other than the first, until torch is
  used in that thread. `torch.get_num_threads` is right in all threads;
- torch was told its number of threads as if by `torch.set_num_threads`, which also turns MKL_DYNAMIC off;
- which signals are ignored, and the stack size of new threads, are as they were when the server started.

Workers are spawned where forking cannot give the same:
- commands that are not Python scripts, and systems without pidfds;
- where the user asks for it: `TUTTI_START=spawn`;
- under coverage measurement, which begins with the interpreter;
- where OpenMP is to bind threads to cores, or gets a list of numbers of threads: it reads that when it is loaded;
- where MKL or OpenBLAS get numbers of threads by variables of their own, which they read when they are loaded;
- where the fork server refuses (it has threads, or initialised CUDA) or does not start.
"""

import ast
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tutti.errors import ConfigError
from tutti.launch import command, fork_client
from tutti.launch.fork_client import ForkChannel, ForkedProcess, ForkRefused, file_with, last_line
from tutti.launch.guardian import Guardian
from tutti.launch.interpreter import main_of
from tutti.launch.lab.placement import ProcessPlacement
from tutti.launch.supervisor_pipe import PARENT, PIPE_VARIABLE

START = "TUTTI_START"
"""Variable that says how workers start: "fork" (where possible; the default) or "spawn"."""

WORKER = ("tutti.launch.worker",)
"""The module that every worker runs."""

TORCH = ("torch",)
"""Modules that almost every script imports."""

TUTTI = ("tutti.launch.torch_groups", "tutti.job", "tutti.data.shard", "tutti.transports.shared_memory.transport")
"""Modules behind `tutti.init`, `tutti.distribute` and `tutti.shard`."""

COMPILER = ("torch._dynamo",)
"""Modules that torch imports when the first optimiser is made."""

_SPAWN_WITH = (
    "COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG", "COV_CORE_SOURCE",
    "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND", "OMP_THREAD_LIMIT",
    "GOTO_NUM_THREADS", "MKL_DOMAIN_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_DEFAULT_NUM_THREADS",
)  # fmt: skip
"""Variables with which workers are spawned."""

_IMPORTERS = {"importlib", "pkgutil", "runpy"}
"""Modules of the standard library by which a script may import anything."""

Process = subprocess.Popen[bytes] | ForkedProcess


@dataclass(frozen=True)
class Program:
    """What each worker of a run executes."""

    arguments: Sequence[str]
    """A script and its arguments, "--function", or with `is_command` a whole command."""
    payload: bytes | None = None
    """Pickled function and arguments, which the worker reads from an open file."""
    is_command: bool = False
    """Whether `arguments` are a command that need not be Python."""
    modules: Sequence[str] = (*WORKER, *TORCH, *TUTTI, *COMPILER)
    """Modules worth importing before workers are forked."""

    def spawned_command(self) -> list[str]:
        """The command line of a worker that is a new process.

        A command that is not Python runs under a small script that binds it to the life of this process. That script
        starts without site-packages (-I, -S), in a few milliseconds.
        """
        if self.is_command:
            return [sys.executable, "-I", "-S", command.__file__, str(os.getpid()), *self.arguments]
        return [*main_of("tutti.launch.worker"), *self.arguments]


def modules_for(script: str) -> tuple[str, ...]:
    """Modules worth importing before a script is forked, judged by its text. A wrong guess costs time only.

    A script that imports from the standard library alone needs none of torch.
    """
    try:
        with open(script, errors="replace") as file:
            text = file.read()
        imported = set(_imports(ast.parse(text)))
    except (OSError, SyntaxError, ValueError):
        return (*WORKER, *TORCH)
    # An import in a function or under a condition counts too: only the text is looked at.
    if imported <= sys.stdlib_module_names - _IMPORTERS and "__import__" not in text:
        return WORKER
    return (*WORKER, *TORCH, *(TUTTI if "tutti" in text else ()), *(COMPILER if "optim" in text else ()))


def _imports(tree: ast.AST) -> Iterator[str]:
    """First names of all modules that a program imports, "" for a relative import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "" if node.level else (node.module or "").partition(".")[0]


def warm_up() -> None:
    """Start the fork server that the next `launch` of this process uses, to import beside what follows here."""
    environment = common_environment({})
    # The same modules as those of `launch`, because a fork server serves only runs that ask for what it has imported.
    program = Program(["--function"])
    if may_fork(program, environment):
        fork_client.channel(environment, program.modules).close()


def common_environment(variables: Mapping[str, str], num_workers: int = 1) -> dict[str, str]:
    """Environment variables that are the same for all workers of a run: this process's, and some more.

    Args:
        variables: those that the run itself adds.
        num_workers: among how many the cores are shared; OMP_NUM_THREADS says otherwise.
    """
    # Workers of one host share its cores. torchrun gives each one thread, however many cores there are.
    threads = max(1, len(os.sched_getaffinity(0)) // num_workers)
    return {
        "OMP_NUM_THREADS": str(threads),
        # After the default above: the user's own OMP_NUM_THREADS counts.
        **os.environ,
        # Lines appear as they are printed: into a pipe, Python would otherwise write whole buffers.
        "PYTHONUNBUFFERED": "1",
        # Workers, and torch itself, learn by this that the launcher serves the store and rank 0 must not.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **variables,
    }


class StoreProcess:
    """The process that serves the store of a run, where the supervisor has no torch to serve it itself."""

    def __init__(self, process: ForkedProcess, errors: int) -> None:
        self._process = process
        self._errors = errors
        """A memory file that gets its stderr, and not a pipe: nobody has to read it while the process runs."""

    @property
    def lost_server(self) -> bool:
        """Whether it ended only because the fork server did."""
        return self._process.lost_server

    def reason(self) -> str | None:
        """How it ended, as the predicate of a sentence about it; None while it runs. It never ends by itself."""
        if self._process.poll() is None:
            return None
        message = last_line(self._errors)
        return self._process.describe_end() + (f": {message}" if message else "")

    def close(self) -> None:
        """Let go of its error output. The process itself ends with the connection to the fork server."""
        os.close(self._errors)


class WorkerStarter:
    """Starts the workers of one run, and the store they meet in if this process has no torch."""

    def __init__(self, program: Program, placement: ProcessPlacement, environment: dict[str, str]) -> None:
        self._program = program
        self._placement = placement
        self.channel: ForkChannel | None = None
        """The connection to the fork server, open until `close`; None if all workers are spawned."""
        if may_fork(program, environment):
            self.channel = fork_client.channel(environment, program.modules)
        self._forks = self.channel is not None
        self._guardian: Guardian | None = None
        """Ends the children of spawned workers, should this process be killed; made with the first such worker."""

    def start(self, slot: int, environment: dict[str, str], files: Sequence[int]) -> Process:
        """Start a worker in a slot. `files`: its stdout, its stderr and its end of the supervisor pipe."""
        # A new file for each worker: one that were shared would have one position, and the second would read nothing.
        payload = [] if self._program.payload is None else [file_with(self._program.payload, "tutti-function")]
        try:
            # Once the server has refused, the rest of the run is spawned: it would refuse again.
            if self._forks and (forked := self._fork(slot, environment, [*files, *payload])) is not None:
                return forked
            return self._spawn(slot, environment, files, payload)
        finally:
            for file in payload:
                os.close(file)

    def start_store(self, listener: socket.socket, environment: dict[str, str]) -> StoreProcess | None:
        """Serve torch's store on `listener` in a process of its own; None if none can be forked."""
        if not self._forks:
            return None
        assert self.channel is not None
        address, port = listener.getsockname()
        description = {
            "arguments": ["--store", address, str(port)],
            "environment": environment,
            "namespace": self._placement.store_host.namespace,
        }
        errors = file_with(b"", "tutti-store-errors")
        # The store has no supervisor pipe and prints nothing that a user should see.
        nowhere = os.open(os.devnull, os.O_RDWR)
        try:
            return StoreProcess(self.channel.start(description, [nowhere, errors, nowhere, listener.fileno()]), errors)
        except BaseException as error:
            os.close(errors)
            # Refused means that this process serves the store itself, after importing torch.
            if not isinstance(error, ForkRefused):
                raise
            self._give_up(error)
            return None
        finally:
            os.close(nowhere)

    def close(self) -> None:
        """End what this run still has in the fork server. May be called again, which does nothing."""
        if self.channel is not None:
            self.channel.close()
        if self._guardian is not None:
            self._guardian.close()
            self._guardian = None

    def _fork(self, slot: int, environment: dict[str, str], files: Sequence[int]) -> ForkedProcess | None:
        """Ask the fork server for a worker; None if it refuses, after a warning."""
        assert self.channel is not None
        description = {
            "arguments": list(self._program.arguments),
            "environment": environment,
            "namespace": self._placement.namespace(slot),
        }
        try:
            return self.channel.start(description, files)
        except ForkRefused as refused:
            self._give_up(refused)
            return None

    def _give_up(self, refused: ForkRefused) -> None:
        """Spawn from now on, and say why: it takes longer, and the user may be able to mend the reason."""
        self._forks = False
        warnings.warn(
            f"workers are spawned, which takes longer, because {refused}. {START}=spawn turns forking off.",
            RuntimeWarning,
            stacklevel=2,
        )

    def _spawn(
        self, slot: int, environment: dict[str, str], files: Sequence[int], payload: Sequence[int]
    ) -> subprocess.Popen[bytes]:
        # The payload is passed by its number, as an argument: an inherited file keeps its number in the child.
        out, err, pipe = files
        if self._guardian is None:
            self._guardian = Guardian()
        process = subprocess.Popen(
            [*self._placement.prefix(slot), *self._program.spawned_command(), *map(str, payload)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            pass_fds=[pipe, *payload],
            env={**environment, PIPE_VARIABLE: str(pipe), PARENT: str(os.getpid())},
            start_new_session=True,  # So that its own children can be ended with it.
        )
        self._guardian.watch(process.pid)
        return process


def may_fork(program: Program, environment: dict[str, str]) -> bool:
    """Whether workers of this program are forked, as far as is known before the server is asked."""
    how = environment.get(START, "fork")
    if how not in ("fork", "spawn"):
        raise ConfigError(f"{START} must be fork or spawn, got '{how}'.")
    if program.is_command or how == "spawn" or any(name in environment for name in _SPAWN_WITH):
        return False
    # OMP_NUM_THREADS may be a list, one number for each level of nesting. Only OpenMP itself reads that, when it is
    # loaded.
    numbers = [environment[name] for name in fork_client.SET_AFTER_FORK if name in environment]
    return all(number.isdecimal() for number in numbers) and fork_client.available()
