"""Python processes that need not import torch, which takes longer than most of what tests do in them.

How it works. `python` gives a command that stands for an interpreter. It starts this file as a small program, without
site packages, which connects to the server of this test process and sends its arguments, variables, folder and standard
files. The server has imported torch and Tutti. It forks a child that takes all of that over, runs the script or code as
`__main__`, and ends as any Python does. The small program waits for the child's status and ends with the same.

Who ends what: if the small program is killed, its connection closes and the server kills the child. If the test process
ends, the server's standard input closes, and the server kills all children and ends. If the server is killed, the
kernel kills its children, and the small programs see their connections close.

The child has another process number than the small program, and signals to that one do not reach it: a test that sends
signals other than SIGKILL, or that looks at how Python starts, needs a real interpreter.
"""

import array
import atexit
import json
import os
import socket
import sys

_server: "tuple[object, str] | None" = None


def python(*options: str) -> list[str]:
    """The command of a warm interpreter; `options` may be "-W", "error". What follows is a script, or -c and code."""
    global _server  # noqa: PLW0603
    if _server is None:
        _server = _start()
    return [sys.executable, "-I", "-S", __file__, _server[1], *options]


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
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)
        text = json.dumps({"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}).encode()
        connection.sendmsg([text], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
        answer = connection.recv(16)
    if not answer:
        sys.exit("the warm server has ended")
    status = int(answer)
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status)


# --- the server ---


def serve() -> None:
    """Fork a child for every connection; returns nothing in the server, and runs the program in the child."""
    import ctypes
    import selectors
    import signal

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # Also if the test process is killed.
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
                for pid, _ in children.values():
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            elif key.fileobj is listener:
                connection, _ = listener.accept()
                request, files, _, _ = socket.recv_fds(connection, 2**20, 3)
                if (pid := os.fork()) == 0:
                    selector.close()
                    for each in (listener, connection, *(other for _, other in children.values())):
                        each.close()
                    for file in children:
                        os.close(file)
                    return _run(json.loads(request), files)
                for file in files:
                    os.close(file)
                file = os.pidfd_open(pid)
                children[file] = pid, connection
                selector.register(file, selectors.EVENT_READ)
                selector.register(connection, selectors.EVENT_READ, pid)
            elif key.fileobj in children:
                pid, connection = children.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                if connection in selector.get_map():
                    selector.unregister(connection)
                    connection.send(str(status).encode())
                connection.close()
            else:  # The small program was killed.
                selector.unregister(key.fileobj)
                os.kill(key.data, signal.SIGKILL)


def _import_all() -> None:
    import gc
    import importlib

    from tutti.launch.start import COMPILER, TORCH, TUTTI, WORKER

    for name in ("pytest", *WORKER, *TORCH, *TUTTI, *COMPILER):  # What the fork server of workers imports too.
        importlib.import_module(name)
    gc.freeze()
    gc.enable()


def _run(request: dict[str, object], files: list[int]) -> None:
    """In the child: become what was asked for, and run it. The interpreter ends after that, as always."""
    import random
    import runpy
    import types
    import warnings

    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[arg-type]
    os.chdir(str(request["folder"]))
    random.seed()
    options = list(request["arguments"])  # type: ignore[call-overload]
    if options[:2] == ["-W", "error"]:
        warnings.simplefilter("error")
        options = options[2:]
    added = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder not in sys.path]
    if options[0] == "-c":
        sys.argv = ["-c", *options[2:]]
        sys.path[:0] = ["", *added]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(options[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = options
        sys.path[:0] = [os.path.dirname(os.path.abspath(options[0])), *added]
        runpy.run_path(options[0], run_name="__main__")


if __name__ == "__main__":
    _ask(sys.argv[1], sys.argv[2:])
