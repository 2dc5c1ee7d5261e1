"""What every test gets: one thread for torch, and a check that it leaves nothing behind."""

import gc
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

import openmp  # noqa: F401  # Before all that imports torch.
import warm
from command import Call, Ended
from tutti.bench import under_mpi
from tutti.launch import fork_client, supervisor
from tutti.world import current_world

settings.register_profile("tutti", derandomize=True, deadline=None)  # The same examples every time: no luck.
settings.load_profile("tutti")

_MARK = f"TUTTI_TEST_RUN={uuid.uuid4()}"
"""Every process that a test starts inherits this, however far down: so orphans are found too.

Each process that runs tests has its own: with several side by side, none sees what the others start.
"""

os.environ.update([_MARK.split("=")])

sys.dont_write_bytecode = False  # Tests start hundreds of processes: each would compile all of Tutti by itself.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # Of a shell that started this in its background.
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Processes that tests start would inherit it.

_OWNER = re.compile(r"tutti-.+-(\d+)-\d+-(?:switch|host\d+)")

_SETTLE_SECONDS = 5.0
_LISTENS = socket.SOL_SOCKET, socket.SO_ACCEPTCONN

_THERE_BEFORE = frozenset(name for name in os.listdir("/proc") if name.isdigit())
"""Processes that no test can have started: they are many, and to look at each around every test takes long."""

_strangers: set[str] = set()
"""Processes that were looked at and are of nobody here, as long as they run."""

_mapped: set[str] = set()
"""Shared memory that was mapped after the last test. To list mappings takes long, so it is done once a test."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """Collect no garbage while a failure is reported.

    The report parses sources. Before Python 3.11.8 and 3.12.2, code that a collection runs may break that ("AST
    constructor recursion depth mismatch"), and so end the whole run in place of one test.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return (yield)
    finally:
        if enabled:
            gc.enable()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """torch's threads on a machine as small as this only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves processes, threads, ports, shared memory, namespaces, signal handlers or a world."""
    before = _beside_mappings() | _mapped
    yield
    wait_s, deadline = 0.001, time.monotonic() + _SETTLE_SECONDS
    left = _everything() - before
    collected = bool(left)
    while left and time.monotonic() < deadline:
        gc.collect()  # What only a cycle keeps is not lost.
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, 0.05)
        left &= _everything()  # What comes and goes meanwhile is another's: other tests may run beside this one.
        left -= {each for each in left if each.startswith("/dev/shm/") and _mapped_by_others(each)}
    assert not left, f"left behind: {sorted(left)}"
    if collected:
        gc.freeze()  # Modules that this test was the first to import: the next collection need not look at them.
    if (world := current_world()) is not None:
        world.close()  # The tests after this one should not fail too.
        raise AssertionError("left behind: a world that tutti.init made in this process")


def pytest_collection_finish() -> None:
    """What is there now is there to the end: the collector need not look at it after every test."""
    gc.collect()
    gc.freeze()
    for logger in logging.Logger.manager.loggerDict.values():
        # To each logger that passes nothing on, of which torch has dozens, pytest adds its handlers six times a test.
        if isinstance(logger, logging.Logger) and logger.name.split(".")[0] == "torch":
            logger.propagate = True


def _everything() -> set[str]:
    return _beside_mappings() | _mappings()


def _beside_mappings() -> set[str]:
    return _processes() | _threads() | _listening() | _shared_memory() | _namespaces() | _handlers()


def _handlers() -> set[str]:
    """Handlers of the signals that ask a job to stop: processes that are forked later would inherit them."""
    found = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    usual = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler)
    return {f"handler {handler} of {each.name}" for each, handler in found.items() if handler not in usual}


def _processes() -> set[str]:
    found = set()
    # Reused by all tests, and closed when Python ends.
    kept = {str(pid) for pid in (*fork_client.server_pids(), *warm.server_pids())}
    there = {name for name in os.listdir("/proc") if name.isdigit()} - _THERE_BEFORE
    _strangers.intersection_update(there)  # The number of one that has ended may be another's.
    for name in there - _strangers - kept:
        folder = Path("/proc") / name
        try:
            environment = (folder / "environ").read_bytes()
            if _MARK.encode() not in environment:
                if environment:  # It starts, or has ended, or is the kernel's.
                    _strangers.add(name)
                continue
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if int(name) != os.getpid() and state not in "ZX":
            found.add(f"process {name}")
    return found


def _threads() -> set[str]:
    # torch's compiler shows progress by tqdm, where that is installed, whose own thread stays.
    threads = (thread for thread in threading.enumerate() if thread.name != "tqdm_monitor")
    return {f"thread {thread.name} {thread.ident}" for thread in threads}


def _listening() -> set[str]:
    """Ports on which this process listens; other processes of ours are found as processes."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockopt(*_LISTENS):
                    found.add(f"port {one.getsockname()[1]}")
        except OSError:
            continue  # It was closed meanwhile.
    return found


def _shared_memory() -> set[str]:
    # Open MPI's own segments come and go with any mpirun on this machine, not only with a test's.
    return {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if not name.startswith("sm_segment.")}


def _mappings() -> set[str]:
    maps = Path("/proc/self/maps").read_bytes()
    _mapped.clear()
    if b"/memfd:tutti" in maps:  # Seldom: to take hundreds of lines apart takes longer than all else here.
        lines = maps.decode().splitlines()
        _mapped.update(f"mapping {line.split()[0]}" for line in lines if "/memfd:tutti" in line)
    return set(_mapped)


def _mapped_by_others(file: str) -> bool:
    """Whether a process that no test of this one started has it: then it was made by another that runs beside us."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with suppress(OSError):  # It ended meanwhile.
                # By number, not by name: a semaphore is mapped before it gets its own.
                mapped = re.search(rf" {os.stat(file).st_ino} +/dev/shm/", (folder / "maps").read_text())
                if mapped and _MARK.encode() not in (folder / "environ").read_bytes():
                    return True
    return False


def _namespaces() -> set[str]:
    folder = Path("/run/netns")
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return {f"namespace {name}" for name in names if not _of_others(name)}


def _of_others(namespace: str) -> bool:
    """Whether it is of a lab whose owner, which its name tells, runs and was not started by a test of this process."""
    owner = _OWNER.fullmatch(namespace)
    if owner is None or int(owner[1]) == os.getpid():
        return False
    try:
        environment = Path(f"/proc/{owner[1]}/environ").read_bytes()
    except OSError:
        return False
    return environment != b"" and _MARK.encode() not in environment


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor gives workers no long grace: for a test in which one surely makes no use of it."""
    monkeypatch.setattr(supervisor, "_GRACE_S", 0.3)
    monkeypatch.setattr(supervisor, "_NOTICE_S", 0.3)


@pytest.fixture
def run_cli(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Run the `tutti` command in an empty folder; returns the completed process, output as text."""

    def run(*args: str, timeout: float = 50, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*warm.main_of("tutti.cli"), *args],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "200", **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Call]:
    """The command in this very process, in an empty folder: quicker than `run_cli`. Ranks under mpirun are warm."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("TUTTI_DATA", raising=False)
    monkeypatch.setattr(under_mpi, "main_of", warm.main_of)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*args: str) -> Ended:
        from tutti.cli import main

        monkeypatch.setattr(sys, "argv", ["tutti", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return Ended(ended.value.code, *capfd.readouterr())

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
