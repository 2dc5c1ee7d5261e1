"""Workers of a DataLoader and SIGTERM: from their parent it ends them, from anybody else it does not."""

import ctypes
import gc
import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset

import tutti
from one_thread import worlds
from tutti.data.worker_start import keep_worker, started

END_S = 20.0


class Statuses(Dataset[str]):
    """What the kernel says of the worker, and of a program that the worker starts."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        child = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
        return Path("/proc/self/status").read_text(), child, INITIALISED


class Hangs(Dataset[int]):
    """Its samples never come: the worker says so in a pipe, and waits in a library that keeps the GIL."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        library = ctypes.PyDLL(None)
        os.write(self._pipe, b"hangs")
        while True:
            library.pause()


class Count(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(8))


INITIALISED: list[int] = []


def plain(items: list[Any]) -> list[Any]:
    return items


def initialise(number: int) -> None:
    INITIALISED.append(number)


def signals(status: str, field: str) -> set[int]:
    """The signals in a field of /proc/PID/status."""
    (line,) = [line for line in status.splitlines() if line.startswith(f"{field}:")]
    mask = int(line.split()[1], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def only_worker() -> BaseProcess:
    (worker,) = multiprocessing.active_children()
    return worker


def send(worker: BaseProcess, number: int) -> None:
    """Send a signal from a process that is not the worker's parent."""
    subprocess.run(["kill", f"-{number}", str(worker.pid)], check=True)


@pytest.fixture
def helpers() -> Iterator[None]:
    """End the processes that Python's multiprocessing keeps until its own end, as Python's own tests do.

    The tracker, as it ends, unlinks all semaphores that are still there, and who has one could not unlink it later. The
    thread that fed a worker's queue has two until it ends, for which a DataLoader that is closed does not wait.
    """
    yield
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(END_S)
    gc.collect()
    forkserver._forkserver._stop()
    resource_tracker._resource_tracker._stop()


@pytest.mark.parametrize(
    ("method", "persistent"), [("fork", False), ("fork", True), ("spawn", False), ("forkserver", False)]
)
@pytest.mark.usefixtures("helpers")
def test_signals_of_a_worker_and_of_what_it_starts(method: str, persistent: bool) -> None:
    loader = DataLoader(
        Statuses(),
        batch_size=1,
        num_workers=1,
        multiprocessing_context=method,
        worker_init_fn=initialise,
        collate_fn=plain,
        persistent_workers=persistent,
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    batches = tutti.shard(loader, world=worlds(1, trains=False)[0])
    stop = {signal.SIGTERM, signal.SIGUSR1}
    for _ in range(2):
        for ((worker, child, initialised),) in batches:
            assert initialised == [0], "the user's own function is called once"
            assert not signals(worker, "SigBlk") & stop
            assert signal.SIGTERM in signals(worker, "SigCgt")  # By torch itself under a fork server.
            assert signal.SIGUSR1 in signals(worker, "SigIgn") | signals(worker, "SigCgt")
            assert signal.SIGTERM not in signals(child, "SigBlk") | signals(child, "SigIgn")
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.parametrize("data", ["map-style", "iterable"])
def test_a_worker_outlives_sigterm_from_others(data: str) -> None:
    loader = DataLoader(Count() if data == "iterable" else list(range(8)), batch_size=1, num_workers=1)  # type: ignore[arg-type]
    seen = []
    for number, (value,) in enumerate(tutti.shard(loader, world=worlds(1, trains=False)[0])):
        if number == 0:
            worker = only_worker()
            send(worker, signal.SIGTERM)
            send(worker, signal.SIGUSR1)
        seen.append(int(value))
    assert sorted(seen) == list(range(8))
    worker.join(END_S)
    assert worker.exitcode == 0


def test_a_hanging_worker_ends_when_its_parent_ends_it() -> None:
    reader, writer = os.pipe()
    loader = DataLoader(Hangs(writer), batch_size=1, num_workers=1, persistent_workers=True)
    # As `shard` starts it, but in this thread: nothing is waiting for a batch.
    loader.worker_init_fn = keep_worker
    batches = started(loader)
    worker = only_worker()
    assert os.read(reader, 5)
    send(worker, signal.SIGTERM)
    worker.join(0.1)
    assert worker.is_alive()
    worker.terminate()
    worker.join(END_S)
    assert worker.exitcode == 0
    del batches
    os.close(reader)
    os.close(writer)
