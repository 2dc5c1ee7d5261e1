"""Agent: the process on another host that starts workers there for a launcher, and ends them with it.

How it works. ssh joins the launcher to the agent's standard input and output, on which both send messages (`frames`).
The agent says first what it has found on its host (`report`). The launcher answers with the program; then the fork
server of this host starts to import. Workers are started, forked where possible, signalled, and reported on as the
launcher asks; what they print and report is passed on as bytes, which only the launcher interprets.

One thread does almost everything, in a loop over a selector, and never waits for the launcher: output for it is kept in
`_outbox`, and while that is long nothing is read from workers, whose own writes then wait. A second thread starts the
workers, one after the other, because the first of them waits for the imports of the fork server. The connection to that
server belongs to one thread at a time: the loop does not look for ends of workers while any is being started. Signals
for a worker that is being started are kept until it runs.

The agent ends, and with it every process that it has started, at the first of these:
- the end of its standard input: the launcher, or ssh, has ended, however that came;
- silence of the launcher, which sends something every second, for the limit that it has given: the network is gone;
- the message that the run is over.

If the agent itself is killed, the fork server ends the workers (`tutti.launch.fork_server`), and a guardian those that
were spawned."""

import json
import os
import queue
import selectors
import signal
import socket
import sys
import threading
import time
from typing import Any

from tutti.launch.lab.placement import here
from tutti.launch.local_launcher import LocalProcess
from tutti.launch.ssh.frames import (
    CLOSE,
    ENDED,
    MAGIC,
    PING,
    PING_S,
    PROGRAM,
    REACH,
    REACHED,
    REPORT,
    SIGNAL,
    START,
    STARTED,
    STREAMS,
    FrameReader,
    encode,
)
from tutti.launch.ssh.report import make_report
from tutti.launch.start import Program, WorkerStarter, common_environment

_POLL_S = 0.05
_REACH_S = 5.0
_READ_BYTES = 65_536
_MAX_OUTBOX_BYTES = 1 << 20
_MAX_PAYLOAD_BYTES = 1 << 31


def main(hello: dict[str, Any]) -> None:
    """Serve the launcher at standard input and output until it ends. `hello`: what it has said first."""
    output = os.dup(1)
    os.dup2(2, 1)  # Whatever else prints must not be taken for a message.
    os.set_blocking(output, False)
    agent = _Agent(hello, output)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, agent.note_signal)  # Not ignored, which workers would inherit.
    try:
        agent.run()
    finally:
        agent.end_all()


class _Worker:
    """A worker of this host, and the reading ends of its pipes."""

    def __init__(self, process: LocalProcess, files: list[int]) -> None:
        self.process = process
        self.streams = dict(zip(files, STREAMS, strict=True))
        self.has_ended = False


class _Agent:
    def __init__(self, hello: dict[str, Any], output: int) -> None:
        self._hello, self._output = hello, output
        self._starter: WorkerStarter | None = None
        self._environment = common_environment({}, hello["num_workers"])
        self._workers: dict[int, _Worker] = {}
        self._starting: dict[int, list[dict[str, Any]]] = {}
        """Signals for the workers that are being started, in order."""
        self._to_start: queue.Queue[tuple[int, dict[str, str]]] = queue.Queue()
        self._started: queue.Queue[tuple[int, _Worker | Exception]] = queue.Queue()
        self._frames = FrameReader(_MAX_PAYLOAD_BYTES)
        self._outbox = bytearray()
        self._sent_at = self._heard_at = time.monotonic()
        self._is_over = False
        self._to_pass_on: list[signal.Signals] = []
        # Readable when something has come from any worker: taken out of the loop while the launcher does not read.
        self._pipes = selectors.DefaultSelector()
        self._loop = selectors.DefaultSelector()
        self._loop.register(0, selectors.EVENT_READ)
        self._loop.register(self._pipes, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the launcher is gone, or says that the run is over."""
        self._outbox += MAGIC
        self._send(REPORT, 0, json.dumps(make_report(self._hello["folder"], self._hello["script"])).encode())
        while not self._is_over:
            self._watch(self._pipes, len(self._outbox) < _MAX_OUTBOX_BYTES)
            self._watch(self._output, bool(self._outbox), selectors.EVENT_WRITE)
            is_busy = self._starting or any(not worker.has_ended for worker in self._workers.values())
            for key, _ in self._loop.select(_POLL_S if is_busy else PING_S):
                if key.fileobj == 0:
                    self._receive()
                elif key.fileobj == self._output:
                    self._flush()
                else:
                    self._read_pipes()
            self._note_starts()
            self._note_ends()
            while self._to_pass_on:
                sign = self._to_pass_on.pop(0)
                for number in self._workers.keys() | self._starting.keys():
                    self._signal(number, sign, group=False)
            now = time.monotonic()
            if now - self._sent_at > PING_S:
                self._send(PING)
            if now - self._heard_at > self._hello["silence_s"]:
                print("the launcher was silent for too long", file=sys.stderr)
                return

    def note_signal(self, number: int, _: Any) -> None:
        """Pass on what a scheduler sends when it is about to take the host away, so that workers save their state.

        The agent itself stays, because they need it. It ends with the launcher, or by SIGKILL.
        """
        if number in (signal.SIGTERM, signal.SIGUSR1):
            self._to_pass_on.append(signal.Signals(number))

    def end_all(self) -> None:
        """Kill all that was started here."""
        for worker in self._workers.values():
            worker.process.signal_group(signal.SIGKILL)
        # While a worker is being started, its connection is the other thread's. It ends with this process, and then the
        # fork server ends that worker as well.
        if self._starter is not None and not self._starting:
            self._starter.close()

    def _watch(self, source: Any, yes: bool, event: int = selectors.EVENT_READ) -> None:
        watched = source in (key.fileobj for key in self._loop.get_map().values())
        if yes and not watched:
            self._loop.register(source, event)
        elif watched and not yes:
            self._loop.unregister(source)

    # What the launcher asks

    def _receive(self) -> None:
        data = os.read(0, _READ_BYTES)
        if not data:
            self._is_over = True
            return
        self._heard_at = time.monotonic()
        for kind, number, payload in self._frames.feed(data):
            if kind == PROGRAM:
                self._take_program(payload)
            elif kind == START:
                self._starting[number] = []
                self._to_start.put((number, json.loads(payload)))
            elif kind == SIGNAL:
                self._signal(number, **json.loads(payload))
            elif kind == REACH:
                self._send(REACHED, 0, json.dumps(_try_to_reach(*json.loads(payload))).encode())
            elif kind == CLOSE:
                self._is_over = True

    def _take_program(self, payload: bytes) -> None:
        about = self._hello["program"]
        program = Program(
            about["arguments"], payload if about["has_payload"] else None, about["is_command"], about["modules"]
        )
        self._starter = WorkerStarter(program, here(self._hello["num_workers"]), self._environment)
        threading.Thread(target=self._start_all, args=(self._starter,), name="starter", daemon=True).start()

    def _start_all(self, starter: WorkerStarter) -> None:
        """Start workers as they are asked for, in a thread of its own that ends with the process."""
        while True:
            number, variables = self._to_start.get()
            try:
                self._started.put((number, self._start(starter, variables)))
            except Exception as error:  # Whatever it is, this worker alone cannot be started.
                self._started.put((number, error))

    def _start(self, starter: WorkerStarter, variables: dict[str, str]) -> _Worker:
        pipes = [os.pipe() for _ in STREAMS]
        readers, writers = [reader for reader, _ in pipes], [writer for _, writer in pipes]
        try:
            return _Worker(LocalProcess(starter.start(0, {**self._environment, **variables}, writers)), readers)
        except Exception:
            for reader in readers:
                os.close(reader)
            raise
        finally:
            for writer in writers:
                os.close(writer)

    def _note_starts(self) -> None:
        while self._starting:
            try:
                number, worker = self._started.get_nowait()
            except queue.Empty:
                return
            signals = self._starting.pop(number)
            if isinstance(worker, Exception):
                self._send_end(number, 1, f"could not be started: {type(worker).__name__}: {worker}")
                continue
            self._workers[number] = worker
            for reader in worker.streams:
                os.set_blocking(reader, False)
                self._pipes.register(reader, selectors.EVENT_READ, (number, worker))
            self._send(STARTED, number, str(worker.process.pid).encode())
            for each in signals:
                self._signal(number, **each)

    def _signal(self, number: int, sign: int, group: bool) -> None:
        if number in self._starting:
            self._starting[number].append({"sign": sign, "group": group})
        elif (worker := self._workers.get(number)) is not None:
            send = worker.process.signal_group if group else worker.process.send_signal
            send(signal.Signals(sign))

    # What workers do

    def _read_pipes(self) -> None:
        for key, _ in self._pipes.select(0):
            self._read(key.fd, *key.data)

    def _read(self, file: int, number: int, worker: _Worker) -> bool:
        """Pass on what has come; return whether anything has."""
        try:
            data = os.read(file, _READ_BYTES)
        except BlockingIOError:
            return False
        self._send(worker.streams[file], number, data)
        if not data:  # All writers are closed, those of the worker's own children included.
            self._pipes.unregister(file)
            os.close(file)
            del worker.streams[file]
        return bool(data)

    def _note_ends(self) -> None:
        if self._starting:
            return
        for number, worker in self._workers.items():
            if not worker.has_ended and (status := worker.process.poll()) is not None:
                worker.has_ended = True
                # All that it has written comes before its end. Its children may go on writing, without an end.
                for file in list(worker.streams):
                    left = _MAX_OUTBOX_BYTES // _READ_BYTES
                    while file in worker.streams and left and self._read(file, number, worker):
                        left -= worker.streams.get(file) != STREAMS[2]
                self._send_end(number, status, worker.process.describe_end())

    def _send_end(self, number: int, status: int, reason: str) -> None:
        self._send(ENDED, number, json.dumps({"status": status, "reason": reason}).encode())

    def _send(self, kind: bytes, number: int = 0, payload: bytes = b"") -> None:
        self._outbox += encode(kind, number, payload)
        self._sent_at = time.monotonic()
        self._flush()

    def _flush(self) -> None:
        try:
            while self._outbox:
                del self._outbox[: os.write(self._output, self._outbox[:_READ_BYTES])]
        except BlockingIOError:
            return
        except OSError:  # ssh is gone.
            self._is_over = True
            self._outbox.clear()


def _try_to_reach(address: str, port: int) -> str | None:
    """Connect to the run's coordinator and disconnect; return what is wrong if that cannot be done."""
    try:
        socket.create_connection((address, port), timeout=_REACH_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
