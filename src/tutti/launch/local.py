"""Start workers on this machine, watch over them and leave nothing behind."""

import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import spawn
from typing import IO, Any

from tutti.cluster import Duration, parse_duration
from tutti.errors import ConfigError, WorkerFailed
from tutti.launch import command
from tutti.launch.interpreter import main_of
from tutti.launch.lab.lab import Lab
from tutti.launch.lab.placement import Placement, here
from tutti.launch.supervisor_pipe import IMPORTING, PARENT, VARIABLE, Inbox, Watcher
from tutti.simulation import guard

_GRACE_S = 2.0
"""How long peers of a failed worker get to notice and say so, and stopped ones to end by themselves."""

_MAX_LINE_BYTES = 65_536

_WORKER = main_of("tutti.launch.worker")


def launch(
    function: Callable[..., Any],
    *args: Any,
    workers: int | None = None,
    timeout: Duration | None = None,
    transport: str | None = None,
    watch: Watcher | None = None,
    lab: Lab | None = None,
) -> list[Any]:
    """Run `function(*args)` in `workers` processes on this machine; return their results by rank.

    Args:
        function: importable by name, as for `multiprocessing`; it calls `tutti.init()` itself.
        workers: 2 by default; in a lab, as many as it has places for, and no other number.
        timeout: how long a worker waits for the others before it gives up: seconds, "40s" or a timedelta.
        transport: as for `tutti.init`.
        watch: called with a rank and what it reported by `tutti.launch.supervisor_pipe.SupervisorPipe.progress`.
        lab: run them on its hosts, from `tutti.lab(...)`.

    Raises `WorkerFailed` for the first worker that failed, after all others have stopped. A worker that called
    `tutti.launch.supervisor_pipe.SupervisorPipe.tolerate_loss` may fail: its result is None and the others go on.
    If all such workers are lost, that is a failure too. In a worker that is still importing the script that called
    `launch`, the call returns an empty list at once, so that the script needs no `if __name__ == "__main__"`.
    """
    if IMPORTING in os.environ:
        return []
    guard.refuse("tutti.launch")
    if VARIABLE in os.environ:
        raise ConfigError(
            "launch was called inside a worker: workers cannot start workers. A script that calls launch is started "
            "with python; under tutti run or torchrun, call the function itself."
        )
    environment = {}
    if timeout is not None:
        environment["TUTTI_TIMEOUT"] = str(parse_duration(timeout).total_seconds())
    if transport is not None:
        environment["TUTTI_TRANSPORT"] = transport
    payload = _pickled(function, args)
    return Supervisor([*_WORKER, "--function"], _place(workers, lab), environment, payload, watch).run()


def run_script(argv: Sequence[str], workers: int | None, environment: dict[str, str], lab: Lab | None = None) -> None:
    """Run a script with its arguments in `workers` processes; raise `WorkerFailed` for the first that failed.

    In a lab, `workers` is None or as many as it has places for.
    """
    Supervisor([*_WORKER, *argv], _place(workers, lab), environment).run()


def run_command(argv: Sequence[str], lab: Lab) -> None:
    """Run any command in every place of a lab; raise `WorkerFailed` for the first that failed."""
    become = [sys.executable, "-I", "-S", command.__file__, str(os.getpid())]
    Supervisor([*become, *argv], lab.placement, {}).run()


def _place(workers: int | None, lab: Lab | None) -> Placement:
    if lab is None:
        return here(2 if workers is None else workers)
    places = lab.placement.num_workers
    if workers not in (None, places):
        raise ConfigError(
            f"{workers} workers do not fit the lab '{lab.name}': it has {lab.spec.hosts} hosts with "
            f"{lab.spec.ranks_per_host} each. Leave workers out, or make it {places}."
        )
    return lab.placement


def _pickled(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        payload = pickle.dumps((function, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"workers cannot get {getattr(function, '__name__', function)!r} and its arguments ({error}). Define the "
            "function at the top level of a file, and pass plain values."
        ) from error
    # What multiprocessing does to make the caller's main module importable in the child, and no more.
    preparation = spawn.get_preparation_data("tutti")
    return pickle.dumps(({key: preparation[key] for key in preparation.keys() - {"authkey", "start_method"}}, payload))


@dataclass(eq=False)
class _Worker:
    """A worker process as its supervisor sees it."""

    rank: int
    process: subprocess.Popen[bytes]
    link: int
    inbox: Inbox = field(default_factory=Inbox)
    lines: dict[int, bytearray] = field(default_factory=dict)
    ended_at: float | None = None

    def reason(self) -> str | None:
        """How it failed; None if it runs, or ended well."""
        if self.inbox.failure is not None:
            return self.inbox.failure.reason
        status = self.process.poll()
        if status is None or status == 0:
            return None
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"exited with status {status}"

    @property
    def knocked_on(self) -> bool:
        return self.inbox.failure is not None and self.inbox.failure.knock_on


class Supervisor:
    """Starts workers, passes on their output and ends when all have ended, or one has failed that was needed."""

    def __init__(
        self,
        argv: list[str],
        placement: Placement,
        environment: dict[str, str],
        payload: bytes | None = None,
        watch: Watcher | None = None,
    ) -> None:
        self._argv = argv
        self._placement = placement
        self._environment = environment
        self._payload = payload
        self._watch = watch
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._first_failed: _Worker | None = None
        self._lost: list[_Worker] = []
        """Expendable workers that failed while the others went on, the first one first."""

    def run(self) -> list[Any]:
        """Start all, wait for all, and return their results by rank."""
        try:
            self._store = self._placement.serve_store()
            for rank in range(self._placement.num_workers):
                self._workers.append(self._start(rank))
            self._watch_until_ended()
        finally:
            self._stop()
        self._raise_first_failure()
        # A worker can be lost after it sent a result, while it was ending.
        return [None if worker in self._lost else worker.inbox.result for worker in self._workers]

    def _start(self, rank: int) -> _Worker:
        link, worker_link = os.pipe()
        passed, argv = [worker_link], list(self._argv)
        if self._payload is not None:
            source = _file_of(self._payload)
            passed.append(source)
            argv.append(str(source))
        try:
            process = subprocess.Popen(
                [*self._placement.prefix(rank), *argv],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=passed,
                env=self._environment_of(rank, worker_link),
                start_new_session=True,  # So that its own children can be ended with it.
            )
        finally:
            for file in passed:
                os.close(file)
        worker = _Worker(rank, process, link)
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            worker.lines[stream.fileno()] = bytearray()
            self._selector.register(stream, selectors.EVENT_READ, worker)
        self._selector.register(link, selectors.EVENT_READ, worker)
        return worker

    def _environment_of(self, rank: int, link: int) -> dict[str, str]:
        threads = max(1, len(os.sched_getaffinity(0)) // self._placement.num_workers)
        return {
            "OMP_NUM_THREADS": str(threads),
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            **self._placement.environment(rank),
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            VARIABLE: str(link),
            PARENT: str(os.getpid()),
            **self._environment,
        }

    def _watch_until_ended(self) -> None:
        deadline = None
        while any(worker.ended_at is None for worker in self._workers):
            self._read(0.05)
            self._note_ends()
            if self._first_failed is not None and deadline is None:
                deadline = time.monotonic() + _GRACE_S
            if deadline is not None and time.monotonic() > deadline:
                return
        self._drain()

    def _read(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            data = os.read(key.fd, 65536)
            worker: _Worker = key.data
            if not data:
                self._selector.unregister(key.fileobj)
            elif key.fd == worker.link:
                for values in worker.inbox.feed(data):
                    if self._watch is not None:
                        self._watch(worker.rank, values)
            else:
                self._pass_on(worker, key.fd, data)

    def _pass_on(self, worker: _Worker, file: int, data: bytes, last: bool = False) -> None:
        """Print whole lines, each with its rank; a line without an end stays until there is one, or too much of it.

        A carriage return ends a line too: progress bars would show nothing otherwise.
        """
        buffer = worker.lines[file]
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not end and not last and len(buffer) + len(data) < _MAX_LINE_BYTES:
            buffer += data
            return
        end = end or len(data)
        text = bytes(buffer + data[:end]).decode(errors="replace")
        buffer[:] = data[end:]
        target: IO[str] = sys.stdout if file == worker.process.stdout.fileno() else sys.stderr  # type: ignore[union-attr]
        for line in text.replace("\r\n", "\n").replace("\r", "\n").rstrip("\n").split("\n") if text else []:
            print(f"[rank {worker.rank}] {line}", file=target)
        target.flush()

    def _note_ends(self) -> None:
        failed = [worker for worker in self._newly_ended() if self._watched_reason(worker)]
        for worker in sorted(failed, key=lambda worker: (worker.inbox.tolerates_loss, worker.knocked_on)):
            if self._first_failed is None and worker.inbox.tolerates_loss:
                self._lose(worker)
            elif self._first_failed is None or self._first_failed.knocked_on:
                self._first_failed = worker

    def _newly_ended(self) -> list[_Worker]:
        """Who has ended since; looks until there are no more, so that nobody is judged before who caused it."""
        ended: list[_Worker] = []
        while found := [it for it in self._workers if it.ended_at is None and it.process.poll() is not None]:
            for worker in found:
                worker.ended_at = time.monotonic()
            ended += found
        return ended

    def _lose(self, worker: _Worker) -> None:
        """Go on without a worker, and end what it started now: until the run ends may take long."""
        self._lost.append(worker)
        _signal_group(worker.process.pid, signal.SIGKILL)
        outlook = ": the others go on without it" if len(self._lost) < len(self._workers) else ""
        reason = " ".join((worker.reason() or "failed").split()).rstrip(".")
        print(f"[rank {worker.rank}] {reason}{outlook}", file=sys.stderr, flush=True)

    def _watched_reason(self, worker: _Worker) -> str | None:
        while self._ready(worker.link):
            self._read(0)
        return worker.reason()

    def _ready(self, file: int) -> bool:
        return any(key.fd == file for key, _ in self._selector.select(0))

    def _drain(self) -> None:
        """Read what is left. A worker's own children may hold its pipes open: wait for them no longer than a moment."""
        deadline = time.monotonic() + _GRACE_S
        while self._selector.get_map() and time.monotonic() < deadline:
            self._read(0.05)

    def _stop(self) -> None:
        """End all that still runs, children of workers included, and close everything."""
        try:
            self._signal_all(signal.SIGTERM)
        finally:  # Also when the user presses Ctrl-C again because ending takes too long.
            self._signal_all(signal.SIGKILL)
            self._close()

    def _signal_all(self, sign: signal.Signals) -> None:
        """Send a signal to workers (the last one to all that they started, too) and give them a moment to end."""
        running = [worker for worker in self._workers if worker.process.poll() is None]
        for worker in self._workers if sign == signal.SIGKILL else running:
            if worker not in self._lost:  # Those were lost perhaps long ago, and the number may be another's now.
                _signal_group(worker.process.pid, sign)
        deadline = time.monotonic() + _GRACE_S
        for worker in running:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))

    def _close(self) -> None:
        self._drain()
        for worker in self._workers:
            for file, rest in worker.lines.items():
                if rest:
                    self._pass_on(worker, file, b"", last=True)
            os.close(worker.link)
            assert worker.process.stdout is not None
            assert worker.process.stderr is not None
            worker.process.stdout.close()
            worker.process.stderr.close()
        self._selector.close()
        self._store = None  # type: ignore[assignment]

    def _raise_first_failure(self) -> None:
        first = self._failure()
        if first is None:
            return
        for worker in self._workers:
            told = worker is first or worker in self._lost
            if not told and worker.knocked_on and worker.inbox.failure is not None:
                message = worker.inbox.failure.reason.removeprefix("failed: ")
                print(f"[rank {worker.rank}] {message}", file=sys.stderr)
        status = first.process.returncode
        trace = first.inbox.failure.traceback if first.inbox.failure else ""
        raise WorkerFailed(first.rank, first.reason() or "failed", trace, 128 - status if status < 0 else status)

    def _failure(self) -> _Worker | None:
        """Whose failure is the whole run's."""
        first = self._first_failed
        all_lost = all(worker in self._lost for worker in self._workers if worker.inbox.ever_tolerated_loss)
        if self._lost and all_lost and (first is None or first.knocked_on):
            return next((worker for worker in self._lost if not worker.knocked_on), self._lost[0])
        return first


def _file_of(data: bytes) -> int:
    """An open, unnamed file that holds `data`, read from its start."""
    file = os.memfd_create("tutti-function", 0)
    with os.fdopen(os.dup(file), "wb") as writer:
        writer.write(data)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _signal_group(group: int, sign: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, sign)
