"""Fork server: one process that has imported torch and Tutti, and forks workers that need not import them again.

How it works. The supervisor starts this process (`tutti.launch.fork_client`) with one end of a Unix socket, the
control socket. The server imports what workers need, then waits in one loop and never runs anything else: no tensor
operation, no CUDA call, no thread. So at every fork no lock is held by another thread, and OpenMP, autograd and CUDA
have not started. It imports with one thread (OpenBLAS would start more), and each worker sets its own number.
`_why_not_fork` checks that before each fork, and the child checks that torch's CUDA survived the fork. If either does
not hold, the request is refused and the supervisor spawns.

- Each run of the supervisor sends one end of a new socket over the control socket. That connection is a *client*
  here; its requests and its workers are separate from those of other clients.
- A request is one message with open files: the description of the worker (JSON), its working directory, its two
  outputs, its end of the supervisor pipe, and one more file if it has a payload. The server does not read the
  description: it forks and answers with the process number. The child reads it and becomes the worker (`_become`).
- The child makes its own session before the server answers. So the supervisor can signal the whole process group from
  the moment it knows the number.
- The server watches every child by a pidfd. When one ends, it reports the status and leaves the child unreaped: its
  number cannot be used again while the supervisor may still signal its group. It is reaped when the client closes its
  connection.
- A client that closes its connection has no use for its workers any more: all their process groups are killed.

Who dies with whom: workers ask the kernel to be killed when the server dies (`die_with` in `tutti.launch.worker`). The
server watches the supervisor by a pidfd and by the end of the control socket. When either shows that the supervisor is
gone, the server kills all process groups it started and exits. While it still imports, the kernel kills it instead.
"""

import atexit
import ctypes
import gc
import importlib
import io
import json
import os
import random
import resource
import selectors
import signal
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tutti.launch.command import die_with, outlive
from tutti.launch.supervisor_pipe import PARENT, PIPE_VARIABLE

MAX_FILES = 6
"""Files that come with a request: description, working directory, stdout, stderr, supervisor pipe, payload."""

MAX_DESCRIPTION_BYTES = 16 * 2**20
"""The environment is the largest part of a description; Linux itself bounds it to a few MiB."""

MAX_MESSAGE_BYTES = 4096

_FILE = io.TextIOWrapper.__mro__[-2]
"""The class that every file object has among its bases (`io.IOBase` is an abstract class beside it)."""

UNKNOWN_STATUS = 255
"""Reported for a worker whose status nobody can read any more. It must not count as success."""

REQUEST = b"start"
"""The text of a request: all it says is in its files."""


@dataclass(eq=False)
class _Client:
    """One run of the supervisor: its connection, and the workers it asked for."""

    connection: socket.socket
    running: set[int] = field(default_factory=set)
    unreaped: set[int] = field(default_factory=set)
    """Workers that have ended and whose numbers are still reserved."""


@dataclass(frozen=True)
class _Child:
    """A worker that runs: what its pidfd in the selector stands for."""

    pid: int
    pidfd: int
    client: _Client


def main() -> None:
    """Serve until the supervisor is gone; in a forked child, run a worker to its end.

    Arguments: the number of the control socket, the supervisor's process number, modules to import.
    """
    # An ignored SIGCHLD survives exec. The kernel would then reap workers itself, and their status would be lost.
    # Schedulers send SIGTERM and SIGUSR1 to all processes of a job: workers must not end with this one then, before
    # they have saved their state. It ends with the supervisor.
    handlers = {signal.SIGCHLD: signal.SIG_DFL, signal.SIGTERM: signal.SIG_IGN, signal.SIGUSR1: signal.SIG_IGN}
    inherited = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    control, parent, *modules = sys.argv[1:]
    # Until `outlive`, the kernel kills this process with the thread that started it: imports take seconds, in which no
    # loop watches for the supervisor's end.
    die_with(int(parent))
    before = dict(os.environ)
    gc.disable()  # What is imported stays to the end: the collector need not look at it, here or in any worker.
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    # Some imports set variables (torch, scikit-learn). A worker must have them too, as if it had imported by itself.
    imports = [(name, before.get(name), value) for name, value in os.environ.items() if before.get(name) != value]
    server = _Server(int(control), int(parent))
    # Returns only in a forked child, which goes on here as the worker.
    files = server.serve()
    for number, handler in inherited.items():
        signal.signal(number, handler)
    _become(files, imports, server.pid)
    _run_and_exit(set(sys.modules))


class _Server:
    """The loop of the server; ends only with the process, or in a child."""

    def __init__(self, control: int, parent: int) -> None:
        self.pid = os.getpid()
        self._kept = _open_files() - {control}
        """Files that imported modules hold, and the standard ones: a worker keeps them."""
        self._control = socket.socket(fileno=control)
        self._clients: set[_Client] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._control, selectors.EVENT_READ)
        # Readable when the supervisor has ended. Without data, like the control socket: `_accept` tells the two apart.
        self._selector.register(os.pidfd_open(parent), selectors.EVENT_READ)
        # The kernel's signal would come when the *thread* that started the server ends, and a server may outlive that.
        outlive(parent)

    def serve(self) -> list[int]:
        """Handle events for ever. Returns in a forked child only, with the files of its request."""
        while True:
            # Ended by a request, by the end of a child, or by the end of the supervisor.
            for key, _ in self._selector.select():
                if key.data is None:
                    self._accept(key.fileobj)
                elif isinstance(key.data, _Child):
                    self._report_end(key.data)
                elif key.data in self._clients:
                    files = self._answer(key.data)
                    if files is not None:
                        return files

    def _accept(self, source: Any) -> None:
        """Take in a new client; without a supervisor, end."""
        if source is not self._control:
            self._end()
        # An empty message is the end of the control socket: the supervisor has closed it, or is gone.
        text, files, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, 1)
        if not text:
            self._end()
        client = _Client(socket.socket(fileno=files[0]))
        self._clients.add(client)
        self._selector.register(client.connection, selectors.EVENT_READ, client)

    def _answer(self, client: _Client) -> list[int] | None:
        """Fork a worker as a client asks; in the child, return the files of the request."""
        try:
            text, files, _, _ = socket.recv_fds(client.connection, MAX_MESSAGE_BYTES, MAX_FILES)
        except ConnectionError:
            text, files = b"", []
        if not text:
            self._drop(client)
            return None
        try:
            # A refusal ends nothing: the client starts this worker and all later ones without forking.
            if (reason := self._why_not_fork()) is not None:
                self._send(client, refused=reason)
                return None
            return self._fork(client, files)
        finally:
            # In the child they are the worker's own, and it needs them.
            if os.getpid() == self.pid:
                for file in files:
                    os.close(file)

    def _fork(self, client: _Client, files: list[int]) -> list[int] | None:
        """Fork, and answer with the number once the child leads its own session; in the child, return `files`."""
        # The child holds the writer until it has its own session, and the server reads until the end of the file. So
        # when the server answers, the process group exists and can be signalled.
        ready, started = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(started)
            os.close(ready)
            self._send(client, refused=f"fork failed: {error.strerror}")
            return None
        if pid == 0:
            os.setsid()
            if (reason := _why_unusable()) is not None:
                # Not by its exit status: the server has to answer the request now.
                os.write(started, reason.encode())
                os._exit(0)
            self._close_all_but(files)  # This closes `started` too, which tells the server.
            return files
        os.close(started)
        unusable = os.read(ready, MAX_MESSAGE_BYTES).decode()
        os.close(ready)
        if unusable:
            os.waitpid(pid, 0)
            self._send(client, refused=unusable)
            return None
        # Surely this child, even if it has ended: until it is reaped, no other process gets its number.
        pidfd = os.pidfd_open(pid)
        client.running.add(pid)
        self._selector.register(pidfd, selectors.EVENT_READ, _Child(pid, pidfd, client))
        self._send(client, pid=pid)
        return None

    def _close_all_but(self, files: list[int]) -> None:
        """In a child: close what belongs to the server and to other workers."""
        # Detached, not closed: the numbers are closed below with all others. An object that closed its number when it
        # is collected could close a file of the worker's, which got that number meanwhile.
        self._control.detach()
        for client in self._clients:
            client.connection.detach()
        self._selector.close()
        for file in _open_files() - self._kept - set(files):
            with suppress(OSError):
                os.close(file)

    def _why_not_fork(self) -> str | None:
        """Why a fork could not be safe now; None if it is."""
        if (threads := _num_threads()) > 1:
            return f"the fork server has {threads} threads"
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            return "the fork server has initialised CUDA"
        return None

    def _report_end(self, child: _Child) -> None:
        """Send the status of a child that has ended to its client, and keep its number reserved."""
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        child.client.running.discard(child.pid)
        if child.client not in self._clients:  # Killed when its client was dropped: nobody waits for it.
            _reap(child.pid)
            return
        try:
            # Reads the status and leaves the zombie, which keeps the number reserved until the client is gone.
            ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # An imported module has reaped it. The server must go on for the other workers.
            self._send(child.client, ended=child.pid, status=UNKNOWN_STATUS)
            return
        assert ended is not None
        client_status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        child.client.unreaped.add(child.pid)
        self._send(child.client, ended=child.pid, status=client_status)

    def _send(self, client: _Client, **values: Any) -> None:
        with suppress(ConnectionError):  # The end of the connection is noticed when it is read.
            client.connection.send(json.dumps(values).encode())

    def _drop(self, client: _Client) -> None:
        """Kill all process groups of a client's workers, and free the numbers of those that have ended."""
        self._clients.discard(client)
        self._selector.unregister(client.connection)
        client.connection.close()
        for pid in client.running | client.unreaped:  # One that ended may have left children in its group.
            _kill_group(pid)
        for pid in client.unreaped:  # After the kill: until then the number cannot belong to another group.
            _reap(pid)

    def _end(self) -> NoReturn:
        """The supervisor is gone: kill all that was started for it, and exit."""
        for client in self._clients:
            for pid in client.running | client.unreaped:
                _kill_group(pid)
        os._exit(0)


def _become(files: list[int], imports: list[tuple[str, str | None, str]], server: int) -> None:
    """Turn a forked child into what a new Python process would be, with the files of its request.

    Args:
        files: as `MAX_FILES` lists them.
        imports: environment variables that imports changed: name, value before (None if it was not set), value after.
        server: process number of the fork server.
    """
    description_file, folder, out, err, pipe, *payload = files
    with os.fdopen(description_file, "rb") as source:
        text = source.read(MAX_DESCRIPTION_BYTES + 1)
    # Before anything that can fail, so that a traceback reaches the user.
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.fchdir(folder)
    for file in (out, err, folder):
        os.close(file)
    assert len(text) <= MAX_DESCRIPTION_BYTES
    description = json.loads(text)
    for file in (pipe, *payload):
        os.set_inheritable(file, True)  # As the files that subprocess passes on are.
    environment = description["environment"]
    # Where the request has another value than the server had, an import in the worker would not have changed it so.
    changed = {name: after for name, before, after in imports if environment.get(name) == before}
    # Replaced as a whole: a variable that the supervisor has unset since the server started must not be there.
    os.environ.clear()
    os.environ.update({**environment, **changed, PIPE_VARIABLE: str(pipe), PARENT: str(server)})
    os.umask(description["umask"])
    os.sched_setaffinity(0, description["cores"])
    # As in a spawned worker, whose interpreter was called with -c.
    sys.argv = ["-c", *description["arguments"], *map(str, payload)]
    if description["namespace"] is not None:
        from tutti.launch.lab.namespaces import enter

        enter(description["namespace"])
    _forget_shared_state()
    threads = int(os.environ["OMP_NUM_THREADS"])
    openblas = int(os.environ.get("OPENBLAS_NUM_THREADS", threads))
    _set_num_threads(threads, min(openblas, len(description["cores"])))  # OpenBLAS itself takes no more than the cores.
    _set_limits(description["limits"], description["nice"])


def _set_limits(limits: list[tuple[int, int, int]], nice: int) -> None:
    """Set resource limits (number, soft, hard) and the nice value to the supervisor's.

    The supervisor may have changed them since the server started. If it could raise a hard limit or lower its nice
    value, it had the privilege to do so, and this process has it too. If it has lost that since, the server's stay.
    """
    for number, soft, hard in limits:
        if resource.getrlimit(number) != (soft, hard):
            with suppress(OSError, ValueError):
                resource.setrlimit(number, (soft, hard))
    if os.getpriority(os.PRIO_PROCESS, 0) != nice:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, nice)


def _set_num_threads(openmp: int, openblas: int) -> None:
    """Set what the variables would have set had they been there at import; the server imports with one thread.

    OpenBLAS starts its threads when it is loaded, so that a server with more would not be safe to fork.
    """
    if openmp > 1 and (torch := sys.modules.get("torch")) is not None:
        # Through this handle the libraries that torch loaded are found: its own OpenMP, and MKL inside libtorch.
        libraries_of_torch = ctypes.CDLL(torch._C.__file__)
        libraries_of_torch.omp_set_num_threads(openmp)
        # At its start torch takes MKL's number, which is OpenMP's but no more than there are physical cores.
        mkl_num_threads = getattr(libraries_of_torch, "mkl_get_max_threads", lambda: openmp)
        torch.set_num_threads(mkl_num_threads())  # For all threads; the call above was for this one.
    if openblas > 1:
        with open("/proc/self/maps") as maps:
            libraries = {line.split()[-1] for line in maps if "openblas" in line and ".so" in line}
        for library in libraries:
            for name in ("openblas", "openblas64_", "scipy_openblas", "scipy_openblas64_"):
                prefix, suffix = name.removesuffix("64_"), "64_" if name.endswith("64_") else ""
                if (function := getattr(ctypes.CDLL(library), f"{prefix}_set_num_threads{suffix}", None)) is not None:
                    function(openblas)


def _run_and_exit(imported: set[str]) -> NoReturn:
    """Run the worker and end the process as Python would, but leave the modules in `imported` as they are.

    To tear them down would write to every page that is shared with the server, so that each is copied: that took 0.35 s
    of processor time for each worker. What the user's code left is torn down: non-daemon threads are waited for, exit
    handlers run, modules are dropped, objects are finalised and files are flushed, in this order as in Python itself.
    """
    worker = importlib.import_module("tutti.launch.worker")
    own_main = sys.modules["__main__"]
    status = 0
    try:
        worker.main()
    except SystemExit as ended:
        status = _exit_status(ended)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    # The user's main module may stand here (`multiprocessing.spawn.prepare` puts it in): it is dropped like the others.
    sys.modules["__main__"] = own_main
    for name in sys.modules.keys() - imported:
        del sys.modules[name]
    gc.collect()
    # By type: isinstance asks the objects themselves, and some of torch's answer with a warning.
    for file in [item for item in gc.get_objects() if _FILE in type(item).__mro__]:
        with suppress(Exception):  # It may be closed, or nobody may read it any more.
            file.flush()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(status)


def _exit_status(ended: SystemExit) -> int:
    """The status that Python would exit with."""
    if ended.code is None:
        return 0
    if isinstance(ended.code, int):
        return ended.code & 0xFF
    print(ended.code, file=sys.stderr)
    return 1


def _forget_shared_state() -> None:
    """Renew what a fork copies and a new process would draw afresh: random states, keys and lists of folders."""
    random.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    if (process := sys.modules.get("multiprocessing.process")) is not None:
        process.current_process().authkey = os.urandom(32)
    importlib.invalidate_caches()  # The user's folders may have got files since the server looked.


def _why_unusable() -> str | None:
    """Why this child cannot be a worker; None if it can.

    Torch marks the children of a process that asked the CUDA driver for anything, if only for the number of devices.
    In the server itself nothing shows that, and to ask the driver would do the damage.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda._is_in_bad_fork():
        return "a module that the fork server imported has used the CUDA driver, which does not survive a fork"
    return None


def _num_threads() -> int:
    """Number of threads of this process, those that libraries started included."""
    return len(os.listdir("/proc/self/task"))


def _open_files() -> set[int]:
    """Numbers of this process's open files, without the one that the listing itself needs for a moment."""
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    files = set()
    for number in numbers:
        with suppress(OSError):
            os.fstat(number)
            files.add(number)
    return files


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):  # It has been reaped: there is no number to free.
        os.waitpid(pid, 0)


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
