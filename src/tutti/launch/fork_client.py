"""The supervisor's side of the fork server: start one, reuse it, and ask it for workers.

How it works. `channel(environment, modules)` gives a run its own connection to a server whose imports saw the same
environment. Variables that act when a module is imported (`IMPORT_TIME_PREFIXES`) make up the server's key: a run with
other values gets another server. All else a worker is told when it is forked. At most `_MAX_SERVERS` stay; the one used
longest ago is closed when another is needed, unless a run still uses it.

A `ForkChannel` belongs to one thread. It sends requests and receives two kinds of messages: answers to requests, and
ends of workers. A wait for an answer is ended by the answer, by the server's death, which closes the connection, or
after `ANSWER_TIMEOUT_S`. A server that is alive but does not answer (it is stopped, or an import hangs) is killed then:
were it to continue, it would fork a worker that has been spawned meanwhile. The wait for a worker's end has the
deadline of its caller. When the server dies, all its workers count as killed: the kernel kills them with their parent.

`_lock` guards the list of servers and their numbers of channels. No wait happens with it held: servers that are to be
closed are taken off the list first. The memory file with a server's error output may be read by a run that has just
lost the server, while another thread closes it; each server has a lock for that.

A server lives until this process ends, so that many calls of `launch` import torch once. It is closed at exit. If
this process is killed, the server notices by itself (see `tutti.launch.fork_server`). A forked copy of this process
forgets the servers of the original: they are not its children."""

import array
import atexit
import functools
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from tutti.launch.fork_server import MAX_MESSAGE_BYTES, REQUEST
from tutti.launch.interpreter import main_of

IMPORT_TIME_PREFIXES = (
    "ATEN_", "CUBLAS", "CUDA", "CUDNN_", "DNNL_", "GLIBC_", "GOMP_", "GOTO_", "HIP_", "HOME", "HSA_", "KINETO_", "KMP_",
    "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "NUMBA_", "NUMEXPR_", "NVIDIA_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHON",
    "PYTORCH_", "ROCR_", "TMPDIR", "TORCH", "TRITON_", "TZ", "XDG_",
)  # fmt: skip
"""Variables that Python, its libraries and torch read when they are loaded."""

READ_LATER = (
    "CUDA_MODULE_LOADING", "CUDA_VISIBLE_DEVICES", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR",
)  # fmt: skip
"""Variables with such a prefix that need no other server.

Some are first read in the worker: CUDA is not initialised before the fork. Others are set by an import (torch._dynamo,
torch.cuda, scikit-learn) in the supervisor too: between two runs they would look like a change that the user made.
"""

SET_AFTER_FORK = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Numbers of threads: the server imports with one thread, and each worker sets its own number."""

ANSWER_TIMEOUT_S = 120.0
"""How long a server may take to answer a request. The first answer has to wait for all its imports."""

# Each of them keeps torch and its libraries in memory.
_MAX_SERVERS = 2
_CLOSE_S = 5.0

_lock = threading.Lock()
_servers: list["_ServerHandle"] = []
"""Servers of this process, the one used last at the end. Guarded by `_lock`."""


class ForkRefused(Exception):
    """The fork server cannot fork safely, or did not start: spawn instead."""


class ForkedProcess:
    """A worker that the fork server forked: its number, and its status once it has ended."""

    def __init__(self, pid: int, channel: "ForkChannel") -> None:
        self.pid = pid
        self.lost_server = False
        """Whether the server ended first, so that the kernel killed this process."""
        self.returncode: int | None = None
        """As subprocess has it: the status it exited with, or minus the number of the signal that killed it."""
        self._channel = channel

    def poll(self) -> int | None:
        """Its status, or None if it runs."""
        self._channel.receive()
        return self.returncode

    def wait(self, timeout: float) -> None:
        """Wait until it has ended; `subprocess.TimeoutExpired` if it has not within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            # Looked at after the poll, so that an end in the last moment still counts.
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout)
            self._channel.wait(left_s)

    def describe_end(self) -> str:
        """How it ended, as the predicate of a sentence about it."""
        if self.lost_server:
            return f"was killed because the fork server that started it has {self._channel.describe_server_end()}"
        return describe_status(self.returncode)


class ForkChannel:
    """One run's connection to a fork server. Closing it kills workers that still run."""

    def __init__(self, server: "_ServerHandle", connection: socket.socket) -> None:
        self._server = server
        self._connection = connection
        self._processes: dict[int, ForkedProcess] = {}
        self._answer: dict[str, Any] | None = None
        self.server_ended = False
        """Whether the server ended before the channel was closed; its workers were killed then."""
        self._closed = False

    def fileno(self) -> int:
        """For a selector: readable when there is something to `receive`."""
        return self._connection.fileno()

    def start(self, description: Mapping[str, Any], files: Sequence[int]) -> ForkedProcess:
        """Fork a worker; returns once it has its own process group.

        Raises `ForkRefused` if the server refuses, has ended, or does not answer within `ANSWER_TIMEOUT_S`. In the last
        case the server is killed, and with it what it forked before.

        Args:
            description: arguments, environment, namespace of the worker.
            files: its stdout, its stderr, its end of the supervisor pipe, and a payload if it has one.
        """
        self._answer = None
        # There is one request at a time, because a channel belongs to one thread: the next message that is not an end
        # is its answer.
        self._request(json.dumps({**description, **_inherited()}).encode(), files)
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while self._answer is None and not self.server_ended:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                # Killed, not left: once it continued, it would answer a request for which a worker has been spawned
                # meanwhile.
                self._server.kill(f"it did not answer within {ANSWER_TIMEOUT_S:g} s")
                self._lose_server()
                break
            self.wait(left_s)
            self.receive()
        if self._answer is None:
            raise ForkRefused(f"the fork server has {self._server.describe_end()}")
        if "refused" in self._answer:
            raise ForkRefused(self._answer["refused"])
        return self._processes[self._answer["pid"]]

    def wait(self, timeout: float) -> None:
        """Wait until there is something to `receive`, at most `timeout` seconds."""
        if not self.server_ended:
            poll = select.poll()  # select.select takes no file whose number is 1024 or more.
            poll.register(self._connection, select.POLLIN)
            poll.poll(timeout * 1000)

    def receive(self) -> None:
        """Take in all messages that have come."""
        while not self.server_ended:
            try:
                text = self._connection.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionError:
                text = b""
            if not text:
                self._lose_server()
                return
            message = json.loads(text)
            if "ended" in message:
                # The number is known here: the server reports an end only after it has sent the answer with that
                # number.
                self._processes[message["ended"]].returncode = message["status"]
                continue
            if "pid" in message:
                # Known from here on: the next message may report its end.
                self._processes[message["pid"]] = ForkedProcess(message["pid"], self)
            self._answer = message

    def close(self) -> None:
        """End the connection: the server kills what still runs and frees the numbers of all workers.

        May be called again, which does nothing.
        """
        if self._closed:
            return
        self._closed = True
        self._connection.close()
        self.server_ended = True
        with _lock:
            # From here on `_make_room` may close the server, if no other run uses it.
            self._server.num_channels -= 1

    def describe_server_end(self) -> str:
        """How the server ended, with the last line it wrote, as the predicate of a sentence about it."""
        return self._server.describe_end()

    def _request(self, description: bytes, files: Sequence[int]) -> None:
        source = file_with(description, "tutti-worker")
        try:
            # The working directory as it is now: the server's is that of its start.
            # Open, because it may have no path any more; O_PATH, because it need not be readable.
            folder = os.open(".", os.O_PATH | os.O_DIRECTORY)
            try:
                _send_files(self._connection, REQUEST, [source, folder, *files])
            except ConnectionError:
                self._lose_server()
            finally:
                os.close(folder)
        finally:
            os.close(source)

    def _lose_server(self) -> None:
        """Count all workers that have not ended as killed: the kernel kills them with the server."""
        self.server_ended = True
        for process in self._processes.values():
            if process.returncode is None:
                process.returncode, process.lost_server = -signal.SIGKILL, True


class _ServerHandle:
    """A fork server that this process started."""

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str]) -> None:
        self.key = _key(environment)
        self.modules = frozenset(modules)
        self.num_channels = 0
        # SOCK_SEQPACKET keeps messages apart, so that open files arrive with the message they belong to.
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors: int | None = os.memfd_create("fork-server-errors")
        self._errors_lock = threading.Lock()
        """Guards `_errors` and `_last_message`."""
        self._last_message = ""
        with control:
            self._process = subprocess.Popen(
                [*main_of("tutti.launch.fork_server"), str(control.fileno()), str(os.getpid()), *modules],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=[control.fileno()],
                env={**environment, **dict.fromkeys(SET_AFTER_FORK, "1")},
                start_new_session=True,  # Ctrl-C in the terminal is for the supervisor.
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def fits(self, key: Mapping[str, str], modules: Sequence[str]) -> bool:
        """Whether it runs, saw the same import-time variables, and imported at least `modules`."""
        return self._process.poll() is None and self.key == key and self.modules >= set(modules)

    def connect(self) -> ForkChannel:
        """Open a connection for one run. With `_lock` held, which guards `num_channels`."""
        # The server may still import: the message waits in the socket, and so do the first requests.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, suppress(ConnectionError):  # If it has died, the channel's first use shows that.
            _send_files(self._control, b"client", [theirs.fileno()])
        self.num_channels += 1
        return ForkChannel(self, ours)

    def kill(self, reason: str) -> None:
        """Kill the server, and with it all its workers, for a reason that `describe_end` repeats."""
        with self._errors_lock:
            self._last_message = reason
        self._process.kill()

    def describe_end(self) -> str:
        """How the server ended, with the last line it wrote, as the predicate of a sentence about it."""
        try:
            # Its connection is closed a moment before its process can be waited for.
            status: int | None = self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            status = None
        self._read_last_message()
        return f"ended with status {status}: {self._last_message or 'no message'}"

    def _read_last_message(self) -> None:
        with self._errors_lock:
            if self._errors is not None and not self._last_message:
                self._last_message = last_line(self._errors)

    def close(self) -> None:
        """End the server and all it started."""
        self._control.close()
        # The server notices the closed control socket in its loop, kills its workers' groups and exits.
        if self.num_channels == 0:  # It has no workers, and may still be importing.
            self._process.kill()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # The kernel kills its workers with it.
            # Ended by the kernel: nothing outlives SIGKILL.
            self._process.wait()
        self._read_last_message()
        with self._errors_lock:
            if self._errors is not None:
                os.close(self._errors)
                self._errors = None

    def forget(self) -> None:
        """In a forked copy of this process: let go of the server without ending it."""
        self._control.close()
        if self._errors is not None:  # Without the lock, which a thread of the original may have held.
            os.close(self._errors)
            self._errors = None
        self._process.returncode = 0  # Not a child of the copy: it must not wait for it, nor warn that it still runs.


def available() -> bool:
    """Whether this system can run a fork server: Linux with pidfds."""
    return sys.platform == "linux" and bool(sys.executable) and _has_pidfds()


@functools.cache
def _has_pidfds() -> bool:
    """Whether Python and the kernel have pidfds; old kernels and the filters of some containers refuse them."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def channel(environment: Mapping[str, str], modules: Sequence[str]) -> ForkChannel:
    """A connection to a server that imported `modules` under the same import-time variables; started if need be."""
    key = _key(environment)
    superfluous: list[_ServerHandle] = []
    try:
        with _lock:
            for server in _servers:
                if server.fits(key, modules):
                    break
            else:
                superfluous = _make_room()
                server = _ServerHandle(environment, modules)
            # To the end of the list: the one used longest ago is the first, and goes first.
            if server in _servers:
                _servers.remove(server)
            _servers.append(server)
            return server.connect()
    finally:
        for server in superfluous:  # Not with the lock held: a server may take seconds to end.
            server.close()


def close_all() -> None:
    """End every fork server of this process."""
    with _lock:
        servers = list(_servers)
        _servers.clear()
    for server in servers:
        server.close()


def server_pids() -> list[int]:
    """Process numbers of the servers there are."""
    with _lock:
        return [server.pid for server in _servers]


def file_with(data: bytes, name: str) -> int:
    """An open, unnamed file that holds `data`, read from its start."""
    file = os.memfd_create(name, 0)
    with os.fdopen(os.dup(file), "wb") as writer:
        writer.write(data)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def last_line(file: int) -> str:
    """The last line of an open file that holds a process's error output; "" if it is empty."""
    size = os.fstat(file).st_size
    lines = os.pread(file, 2**16, max(0, size - 2**16)).decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def describe_status(status: int | None) -> str:
    """How a process ended that has this `returncode`, as the predicate of a sentence about it."""
    if status is not None and status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"


def _make_room() -> list["_ServerHandle"]:
    """Take ended servers off the list, and unused ones until another may be started. With `_lock` held.

    Returns those taken off, which the caller closes once it has released the lock. Nobody else can use them then.
    """
    removed = []
    for server in list(_servers):
        ended = server._process.poll() is not None
        if ended or (server.num_channels == 0 and len(_servers) >= _MAX_SERVERS):
            _servers.remove(server)
            removed.append(server)
    return removed


def _key(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that decide whether two runs can share a server."""
    later = (*READ_LATER, *SET_AFTER_FORK)
    names = [name for name in environment if name.startswith(IMPORT_TIME_PREFIXES) and name not in later]
    return {name: environment[name] for name in names}


def _inherited() -> dict[str, Any]:
    """What a spawned process would inherit from this one, as it is now."""
    # Read at each request: the user may have changed them since the server started.
    with open("/proc/self/status") as status:  # os.umask would have to change it for a moment.
        umask = next(line.split()[1] for line in status if line.startswith("Umask:"))
    numbers = {value for name, value in vars(resource).items() if name.startswith("RLIMIT_")}
    return {
        "umask": int(umask, 8),
        "cores": sorted(os.sched_getaffinity(0)),
        "limits": [(number, *resource.getrlimit(number)) for number in sorted(numbers)],
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
    }


def _send_files(connection: socket.socket, text: bytes, files: Sequence[int]) -> None:
    """Send a message with open files. MSG_NOSIGNAL: a server that is gone is an error here, and no signal."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
    connection.sendmsg([text], rights, socket.MSG_NOSIGNAL)


def _forget_all() -> None:
    """In a forked copy of this process: forget the servers, which are children of the original."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()  # Another thread of the original may have held it.
    while _servers:
        with suppress(OSError):
            _servers.pop().forget()


atexit.register(close_all)
os.register_at_fork(after_in_child=_forget_all)
