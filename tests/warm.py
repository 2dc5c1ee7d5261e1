"""Python processes that need not import torch, which takes longer than most of what tests do in them.

How it works. `python` gives a command that stands for an interpreter. It starts this file as a small program, without
site packages, which connects to the server of this test process and sends its arguments, variables, folder, open files
and namespaces. The server has imported torch and Tutti. It forks a child that takes all of that over, runs the script
or code as `__main__`, and ends as any Python does, but leaves what the server imported as it is: to tear that down
would copy all its memory. The small program waits for the child's status and ends with the same.

A fork server that the child starts for its own workers is warm too, and so need not import torch either.

Who ends what: if the small program is killed, its connection closes and the server kills the child. If the test process
ends, the server's standard input closes, and the server kills all children and ends. If the server is killed, the
kernel kills its children, and the small programs see their connections close.

The child has another process number than the small program, which passes SIGINT, SIGTERM and SIGUSR1 on to it. A test
that sends other signals, or signals to a process group, or that looks at how Python starts, needs a real interpreter.
"""

import array
import atexit
import contextlib
import json
import os
import signal
import socket
import sys

_NAMESPACES = {"net": 0x40000000, "uts": 0x04000000}
"""Namespaces that a lab's hosts have of their own, and the kernel's numbers for them."""

_MAX_FILES = 64

_server: "tuple[object, str] | None" = None


def python(*options: str) -> list[str]:
    """The command of a warm interpreter; `options` may be "-W", "error". What follows is a script, or -c and code."""
    global _server  # noqa: PLW0603
    if _server is None:
        _server = _start()
    return [sys.executable, "-I", "-S", __file__, _server[1], *options]


def main_of(module: str) -> list[str]:
    """As Tutti's `main_of`, in a warm interpreter."""
    from tutti.launch import interpreter

    return [*python(), *interpreter.main_of(module)[1:]]


def server_pids() -> list[int]:
    """The process number of the server, if there is one."""
    return [] if _server is None else [_server[0].pid]  # type: ignore[attr-defined]


def _start() -> tuple[object, str]:
    import subprocess
    import tempfile

    folder = tempfile.TemporaryDirectory(prefix="tutti-warm-")
    path = os.path.join(folder.name, "socket")
    here = os.path.dirname(__file__)
    process = subprocess.Popen(
        [sys.executable, "-c", "import gc; gc.disable(); import warm; warm.serve()", path],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([here, *filter(None, sys.path)])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.read(1) == b"\n", "it listens"
    process.stdout.close()

    def close() -> None:
        process.stdin.close()
        process.wait(10)
        folder.cleanup()

    atexit.register(close)
    return process, path


# --- the small program ---


def _ask(path: str, arguments: list[str]) -> None:
    files = [file for file in map(int, os.listdir("/proc/self/fd")) if _is_open(file)]
    spaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in _NAMESPACES]
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "files": files,
        "session": os.getsid(0) == os.getpid(),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)
        passed = array.array("i", [*spaces, *files])
        connection.sendmsg([json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, _: connection.send(str(number).encode()))
        for file in files:  # The child has them: only its end closes them.
            os.close(file)
        answer = connection.recv(16)
    if not answer:
        sys.exit("the warm server has ended")
    status = int(answer)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _is_open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


# --- the server ---


def serve() -> None:
    """Fork a child for every connection; never returns in the server, and runs the program in the child."""
    import selectors

    _die_with_parent()  # Also if the test process is killed.
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(sys.argv[1])
    listener.listen(64)
    os.write(1, b"\n")
    _import_all()
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    children: dict[int, tuple[int, socket.socket]] = {}  # By pidfd: the process number, and who waits for it.
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                os._exit(0)  # And the kernel kills the children.
            elif key.fileobj is listener:
                connection, _ = listener.accept()
                request, files = _received(connection)
                if request and (pid := os.fork()) == 0:
                    for each in (selector, listener, connection, *(other for _, other in children.values())):
                        each.close()
                    return _run(json.loads(request), files, list(children))
                for file in files:
                    os.close(file)
                if request:
                    file = os.pidfd_open(pid)
                    children[file] = pid, connection
                    selector.register(file, selectors.EVENT_READ)
                    selector.register(connection, selectors.EVENT_READ, pid)
            elif key.fileobj in children:
                pid, connection = children.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                if connection.fileno() >= 0 and connection in selector.get_map():
                    selector.unregister(connection)
                _report(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), connection)
            # Otherwise the child has ended since `select` returned: its connection is closed, and has no number.
            elif key.fileobj.fileno() >= 0 and key.fileobj in selector.get_map():
                number, _ = _received(key.fileobj)
                if not number:  # The small program was killed.
                    selector.unregister(key.fileobj)
                os.kill(key.data, int(number or signal.SIGKILL))


def _received(connection: socket.socket) -> tuple[bytes, list[int]]:
    """A message and its files; an empty one if the small program was killed, which may be at any moment."""
    try:
        return socket.recv_fds(connection, 2**20, _MAX_FILES)[:2]
    except ConnectionError:
        return b"", []


def _report(status: int, connection: socket.socket) -> None:
    """Send the status of a child that has ended to the small program, if that still runs."""
    with connection, contextlib.suppress(ConnectionError):
        connection.send(str(status).encode())


def _die_with_parent() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _import_all() -> None:
    import gc
    import importlib

    from tutti.launch.start import COMPILER, TORCH, TUTTI, WORKER

    for name in ("pytest", *WORKER, *TORCH, *TUTTI, *COMPILER):  # What the fork server of workers imports too.
        importlib.import_module(name)
    if (colours := sys.modules.get("colorama.initialise")) is not None:
        atexit.unregister(colours.reset_all)  # It would write to the terminal of a script that has no use for numba.
    gc.freeze()
    gc.enable()


def _run(request: dict[str, object], passed: list[int], others: list[int]) -> None:
    """In the child: become what was asked for, run it, and end. `others`: files of the server, to be closed."""
    import multiprocessing.process
    import random

    from tutti.launch import fork_client

    _die_with_parent()
    for file in others:
        os.close(file)
    _take_over(request["files"], passed)  # type: ignore[arg-type]
    if request["session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[arg-type]
    os.chdir(str(request["folder"]))
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    random.seed()
    path = sys.argv[1]
    fork_client.main_of = lambda _: [sys.executable, "-I", "-S", __file__, path, "-c", _FORK_SERVER]
    _end(_status_of(list(request["arguments"])))  # type: ignore[call-overload]


_FORK_SERVER = """
from tutti.launch import fork_server
fork_server.die_with = fork_server.outlive = lambda parent: None  # Its parent is the warm server, which ends it.
fork_server.main()
"""


def _take_over(numbers: list[int], passed: list[int]) -> None:
    """Enter the namespaces of the small program, and give its open files the numbers that they have there."""
    import ctypes
    import fcntl

    spaces, files = passed[: len(_NAMESPACES)], passed[len(_NAMESPACES) :]
    for space, (name, kind) in zip(spaces, _NAMESPACES.items(), strict=True):
        if os.fstat(space).st_ino != os.stat(f"/proc/self/ns/{name}").st_ino:
            status = ctypes.CDLL(None).setns(space, kind)  # os.setns is in Python 3.12 only.
            assert status == 0, f"cannot enter {name}"
        os.close(space)
    out_of_the_way = [fcntl.fcntl(file, fcntl.F_DUPFD, max(numbers) + 1) for file in files]
    for file in files:
        os.close(file)
    for number, file in zip(numbers, out_of_the_way, strict=True):
        assert number <= 2 or not _is_open(number), f"file {number} is the warm server's own"
        os.dup2(file, number)
        os.close(file)


def _status_of(options: list[str]) -> int:
    """Run a script or code, and return the status that Python would exit with."""
    import runpy
    import types
    import warnings

    if options[:2] == ["-W", "error"]:
        warnings.simplefilter("error")
        options = options[2:]
    added = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder not in sys.path]
    try:
        if options[0] == "-c":
            sys.argv = ["-c", *options[2:]]
            sys.path[:0] = ["", *added]
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(options[1], "<string>", "exec"), main.__dict__)
        else:
            sys.argv = options
            sys.path[:0] = [os.path.dirname(os.path.abspath(options[0])), *added]
            runpy.run_path(options[0], run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return (ended.code or 0) & 0xFF
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()  # As Python does before it calls the hook.
        sys.excepthook(*sys.exc_info())
        if isinstance(error, KeyboardInterrupt):
            sys.stderr.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


def _end(status: int) -> None:
    """End this process as Python would, but leave what was imported as it is."""
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()  # As mpi4py does when the interpreter itself ends.
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


if __name__ == "__main__":
    _ask(sys.argv[1], sys.argv[2:])
