"""Linux network namespaces by name, as `ip netns` keeps them.

How it works. A namespace is a file in /run/netns that keeps it alive without a process. Files in /etc/netns/NAME stand
for those of /etc inside it. Commands enter a namespace with `ip netns exec`. A thread can enter one too (`enter`), for
good; so `inside` uses a thread of its own, and a forked worker enters before it starts any thread. A socket stays in
the namespace it was made in, whichever thread uses it later.

`remove` first kills all processes inside, until there are none: one of them may fork meanwhile. Only then the names are
deleted, because a namespace without a name that a process still uses could not be found again.
"""

import ctypes
import os
import platform
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from tutti.errors import ConfigError, DeadlineExceeded

FOLDER = Path("/run/netns")

_FILES = Path("/etc/netns")
"""Folder whose subfolder NAME holds files that replace those of /etc in that namespace, as iproute2 defines."""

# From the kernel's headers: linux/sched.h, linux/mount.h and linux/capability.h.
_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000
_MS_BIND, _MS_REC, _MS_SLAVE = 0x1000, 0x4000, 0x80000
_MNT_DETACH = 2
_NET_ADMIN, _SYS_ADMIN = 12, 21

_DEADLINE_S = 20.0
"""Limit for any operation here; each takes milliseconds."""

Result = TypeVar("Result")


def missing() -> str | None:
    """Describe in one line what this machine lacks to make hosts, and how to get it; None if nothing."""
    if platform.system() != "Linux":
        return f"the lab needs Linux's network namespaces, and this is {platform.system()}."
    lacking = []
    if os.geteuid() != 0:
        lacking.append("root (run it with sudo)")
    elif not _privileged():
        lacking.append("the right to make network namespaces (start the container with --privileged)")
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if tools:
        lacking.append(f"{' and '.join(tools)} in PATH (install the package iproute2)")
    return f"the lab needs {', and '.join(lacking)}." if lacking else None


def _privileged() -> bool:
    """Whether this process may make namespaces: root in a container often may not."""
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    held = int(match[1], 16) if match else 0
    return all(held >> capability & 1 for capability in (_NET_ADMIN, _SYS_ADMIN))


def names() -> list[str]:
    """Names of all namespaces, and of those of which only files are left: /etc outlives a restart of the machine."""
    return sorted({entry.name for folder in (FOLDER, _FILES) if folder.is_dir() for entry in folder.iterdir()})


def prefix(name: str) -> list[str]:
    """The words that go before a command to run it in a namespace, without another process in between."""
    return ["ip", "netns", "exec", name]


def write_hosts(name: str, text: str) -> None:
    """Make `text` the /etc/hosts of a namespace."""
    folder = _FILES / name
    folder.mkdir(parents=True)
    (folder / "hosts").write_text(text)


def batch(tool: str, lines: Iterable[str], namespace: str | None = None) -> None:
    """Have `ip` or `tc` carry out `lines`, inside a namespace if one is given; `ConfigError` for the first refused."""
    where = [] if namespace is None else ["-netns", namespace]
    ended = _run([tool, *where, "-batch", "-"], "".join(f"{line}\n" for line in lines))
    if ended.returncode:
        raise ConfigError(f"this machine's {tool} cannot make the lab: {' '.join(ended.stderr.split())}")


def query(*command: str) -> str:
    """What a command prints; nothing if it fails."""
    ended = _run(command)
    return "" if ended.returncode else ended.stdout


def _run(command: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
    # In a session of its own: Ctrl-C in a terminal must not stop it half way.
    return subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=_DEADLINE_S, check=False, start_new_session=True
    )


def remove(doomed: Sequence[str]) -> None:
    """Kill what runs in these namespaces and delete them; those that are gone already are no mistake."""
    deadline = time.monotonic() + _DEADLINE_S
    # Again until nobody is left: a process may fork between the listing and the signal.
    while (pids := processes(doomed)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    present = [name for name in doomed if (FOLDER / name).exists()]
    if present:
        _run(["ip", "-force", "-batch", "-"], "".join(f"netns delete {name}\n" for name in present))
    for name in doomed:
        shutil.rmtree(_FILES / name, ignore_errors=True)
    with suppress(OSError):
        _FILES.rmdir()  # If nobody has anything in it.


def processes(inside: Sequence[str]) -> list[int]:
    """Processes in these namespaces, other than this one."""
    wanted = {found for name in inside if (found := _identity(FOLDER / name))}
    # From /proc and not from `ip netns pids`: that takes a process for each namespace.
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and _identity(Path(f"/proc/{pid}/ns/net")) in wanted]


def _identity(path: Path) -> tuple[int, int] | None:
    """What identifies a namespace, by any file that stands for it: device and inode. None if the file is gone."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def inside(name: str, function: Callable[[], Result]) -> Result:
    """`function()`, called in a namespace: sockets that it makes belong there, wherever they are used later.

    It runs in a thread of its own, because a thread that has entered a namespace stays in it.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            enter(name, sysfs=False)
            results.append(function())
        except BaseException as error:
            errors.append(error)

    # A daemon, so that one that hangs in the kernel does not keep Python from ending.
    thread = threading.Thread(target=work, name=f"inside {name}", daemon=True)
    thread.start()
    thread.join(_DEADLINE_S)
    if errors:
        raise errors[0]
    if not results:
        raise DeadlineExceeded(f"nothing came back from network namespace {name} within {_DEADLINE_S:g} s.")
    return results[0]


def enter(name: str, *, sysfs: bool = True) -> None:
    """Put this thread where `ip netns exec` would put a process: into the namespace, and with its /etc/hosts.

    With `sysfs`, /sys shows the namespace's network interfaces too. The thread stays there.
    """
    library = ctypes.CDLL(None, use_errno=True)  # os.setns is in Python 3.12 only.

    def check(status: int) -> None:
        if status != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot enter network namespace {name}: {os.strerror(code)}")

    file = os.open(FOLDER / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        check(library.setns(file, _CLONE_NEWNET))
    finally:
        os.close(file)
    hosts = _FILES / name / "hosts"
    if hosts.exists():
        # A mount namespace of this thread's own, into which mounts come and from which none go: the bind mount of
        # /etc/hosts is seen here alone.
        check(library.unshare(_CLONE_NEWNS))
        check(library.mount(b"", b"/", b"none", ctypes.c_ulong(_MS_SLAVE | _MS_REC), None))
        if sysfs:
            library.umount2(b"/sys", _MNT_DETACH)  # Not everywhere is one mounted.
            check(library.mount(name.encode(), b"/sys", b"sysfs", ctypes.c_ulong(0), None))
        check(library.mount(bytes(hosts), b"/etc/hosts", b"none", ctypes.c_ulong(_MS_BIND), None))
