"""`HostConnection`: a launcher's connection to its agent on another host, and the workers there.

How it works. The connection is an ssh process. Two threads serve it:

- the writer sends what is in a queue, and something every second in any case. It ends when told to, or when ssh ends;
- the reader takes what comes. The first is what the host's shell has to say, then the agent's report, which sets
  `ready`; from then on the agent sends something every second. What workers have printed and reported goes into the
  pipes from which the supervisor reads. A write into one of them waits for the supervisor, which always reads, and ends
  with an error once it has closed its end.

The connection has ended when ssh has, when the report does not come in time, when the agent is silent for the patience
of the run, or when the report shows that the program cannot run there. The reader then kills ssh, and all workers of
the host count as ended. The agent, if it is still there, ends with its input.

`_lock` guards the workers and `end`: a worker is either started before the end, and ended by it, or never sent."""

import json
import os
import queue
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from tutti.launch.fork_client import describe_status, file_with, last_line
from tutti.launch.ssh.frames import (
    CLOSE,
    ENDED,
    MAGIC,
    PING,
    PING_S,
    PROBLEM,
    REACHED,
    REPORT,
    SIGNAL,
    START,
    STARTED,
    STREAMS,
    FrameReader,
    NotAFrame,
    encode,
)

_CONNECT_S = 60.0
"""How long a host gets from the start of ssh to the report of its agent."""

_CLOSE_S = 10.0
"""How long an agent gets to end what it has started."""

_END_S = 5.0
_READ_BYTES = 65_536
_MAX_NOISE_BYTES = 1 << 20
_LOST_STATUS = 255
"""The status of workers whose host is lost; that of ssh when it cannot connect."""


class RemoteProcess:
    """A worker on another host (`tutti.launch.launcher.WorkerProcess`)."""

    def __init__(self, send: Callable[[bytes, bytes], None], files: Sequence[int], may_run: Callable[[], bool]) -> None:
        """`send` messages about it; what it prints and reports goes into copies of `files`.

        As long as its host is being connected to, it cannot run (`may_run`).
        """
        self.pid = 0
        self.files = {stream: os.dup(file) for stream, file in zip(STREAMS, files[: len(STREAMS)], strict=True)}
        """Where the reader writes what comes from it."""
        self._send, self._may_run = send, may_run
        self._has_ended, self._ending = threading.Event(), threading.Lock()
        self._status: int | None = None
        self._reason = ""

    def poll(self) -> int | None:
        """Its status, or None if it runs."""
        return self._status if self._has_ended.is_set() else None

    def wait(self, timeout: float) -> None:
        """Wait until it has ended; `subprocess.TimeoutExpired` if it has not within `timeout` seconds."""
        if not self._has_ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout)

    def describe_end(self) -> str:
        """How it ended, as the predicate of a sentence about it."""
        return self._reason

    def send_signal(self, sign: signal.Signals) -> None:
        """Send a signal to the worker alone."""
        self._send(SIGNAL, json.dumps({"sign": sign, "group": False}).encode())

    def signal_group(self, sign: signal.Signals) -> None:
        """Send a signal to the worker and all that it has started."""
        # Nobody waits for a host that may never answer. If it does, the signal comes right after the start.
        if sign == signal.SIGKILL and not self._may_run():
            self.finish(-sign, describe_status(-sign))
        self._send(SIGNAL, json.dumps({"sign": sign, "group": True}).encode())

    def finish(self, status: int, reason: str) -> None:
        """Its end is known. Only the first call counts."""
        with self._ending:
            if not self._has_ended.is_set():
                self._status, self._reason = status, reason
                self._has_ended.set()

    def write(self, stream: bytes, data: bytes) -> None:
        """Pass on what it has written; nothing means that no more comes."""
        file = self.files.get(stream)
        view = memoryview(data)
        try:
            while file is not None and view:
                view = view[os.write(file, view) :]
        except OSError:  # The supervisor has closed its end.
            view = view[:0]
            data = b""
        if not data:
            self.close_file(stream)

    def close_file(self, stream: bytes) -> None:
        """Close a pipe, whose reader then comes to its end."""
        if (file := self.files.pop(stream, None)) is not None:
            os.close(file)


class HostConnection:
    """An agent on another host."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        hello: dict[str, Any],
        problems_in: Callable[[dict[str, Any]], list[str]],
        patience_s: float,
        environment: dict[str, str],
    ) -> None:
        """Start ssh; `ready` is set when it is known whether the program can run on the host.

        Args:
            name: of the host, for messages.
            command: ssh with the agent's command.
            hello: the first line of the agent's input. `problems_in` says what in its report is wrong.
            patience_s: how long the agent may be silent.
            environment: of ssh.
        """
        self.name = name
        self.ready = threading.Event()
        self.report: dict[str, Any] = {}
        self.problems: list[str] = []
        """Why the program cannot run there."""
        self.end: str | None = None
        """How the connection ended, as the end of a sentence."""
        self.answers: queue.Queue[Any] = queue.Queue()
        """What the agent says of addresses that it was asked to reach."""
        self._problems_in, self._patience_s = problems_in, patience_s
        self._processes: dict[int, RemoteProcess] = {}
        self._lock = threading.Lock()
        self._has_begun = False
        """Whether the agent has sent anything: then it does so every second."""
        self._is_closing = False
        self._outbox: queue.Queue[bytes | None] = queue.Queue()
        self._outbox.put(json.dumps(hello).encode() + b"\n")
        self._errors = file_with(b"", "tutti-ssh-errors")
        self._ssh = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            bufsize=0,
            start_new_session=True,  # Ctrl-C in the terminal is for the launcher, whose workers may save their state.
        )
        self._threads = [
            threading.Thread(target=work, name=f"{name} {what}", daemon=True)
            for what, work in (("reader", self._read), ("writer", self._write))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, kind: bytes, number: int = 0, payload: bytes = b"") -> None:
        """Send a message, if the agent is there to get it."""
        self._outbox.put(encode(kind, number, payload))

    def start(self, number: int, variables: dict[str, str], files: Sequence[int]) -> RemoteProcess:
        """Have the agent start a worker."""
        process = RemoteProcess(lambda kind, payload: self.send(kind, number, payload), files, self.ready.is_set)
        with self._lock:
            if self.end is None:
                self._processes[number] = process
                self.send(START, number, json.dumps(variables).encode())
                return process
        self._lose(process)
        return process

    def ask_to_end(self) -> None:
        """Ask the agent to end, and with it what it has started."""
        self._is_closing = True
        if not self.ready.is_set():  # Nothing was started.
            self._ssh.kill()
        self.send(CLOSE)

    def close(self) -> bool:
        """End the agent, and what it has started; return whether it has confirmed that."""
        self.ask_to_end()
        reader = self._threads[0]
        reader.join(_CLOSE_S)
        confirmed = not reader.is_alive()
        self._ssh.kill()
        self._outbox.put(None)
        for thread in self._threads:  # Ended by the end of ssh, and of its pipes.
            thread.join(_CLOSE_S)
        self._ssh.wait()
        for pipe in (self._ssh.stdin, self._ssh.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()
        if self._errors >= 0:
            os.close(self._errors)
            self._errors = -1
        return confirmed

    # The writer

    def _write(self) -> None:
        assert self._ssh.stdin is not None
        file = self._ssh.stdin.fileno()
        with suppress(OSError):  # ssh has ended.
            while True:
                try:
                    data = self._outbox.get(timeout=PING_S)
                except queue.Empty:
                    data = encode(PING)
                if data is None:
                    return
                view = memoryview(data)
                while view:  # Ended by ssh, or by its end: the reader kills it when the host is silent.
                    view = view[os.write(file, view) :]

    # The reader

    def _read(self) -> None:
        end = "its agent has failed"
        try:
            end = self._read_all()
        finally:
            self._ssh.kill()
            self._ssh.wait()  # Ended by the kernel.
            said = last_line(self._errors)
            with self._lock:
                self.end = f"{end} ({said})" if said and not self._is_closing else end
            for process in self._processes.values():
                self._lose(process)
            if not self.report and not self.problems:
                self.problems = [self.end]
            self.ready.set()

    def _lose(self, process: RemoteProcess) -> None:
        process.finish(_LOST_STATUS, f"was lost with host {self.name}: {self.end}")
        for stream in STREAMS:
            process.close_file(stream)

    def _read_all(self) -> str:
        """Read until the connection ends; return how."""
        reader = FrameReader(_MAX_NOISE_BYTES)
        noise = bytearray()
        """What the shell prints before the agent begins."""
        try:
            for data in self._chunks():
                rest = data
                if not self._has_begun:
                    noise += data
                    before, found, rest = bytes(noise).partition(MAGIC)
                    self.problems = _problems_of_shell(before)
                    self._has_begun = bool(found)
                    if len(before) > _MAX_NOISE_BYTES:
                        return "its shell prints without an end"
                for kind, number, payload in reader.feed(rest):
                    self._take(kind, number, payload)
                if self.report and self.problems:
                    break
        except TimeoutError as error:
            return str(error)
        except (NotAFrame, ValueError, KeyError) as error:
            return f"something there writes into the connection ({error})"
        return "; ".join(self.problems) or self._describe_end()

    def _describe_end(self) -> str:
        status = None
        with suppress(subprocess.TimeoutExpired):
            status = self._ssh.wait(_END_S)  # It has closed its output.
        if status == _LOST_STATUS and not self._has_begun:
            return f"ssh cannot connect; `ssh {self.name} true` has to work without a question"
        return f"the connection ended with status {status}"

    def _chunks(self) -> Iterator[bytes]:
        """What comes, piece by piece. Raises `TimeoutError` if nothing comes for too long."""
        assert self._ssh.stdout is not None
        file = self._ssh.stdout.fileno()
        poll = select.poll()
        poll.register(file, select.POLLIN)
        heard = time.monotonic()
        while True:
            limit_s = self._patience_s if self._has_begun else _CONNECT_S
            if poll.poll(PING_S * 1000):
                data = os.read(file, _READ_BYTES)
                if not data:
                    return
                if self._has_begun or MAGIC in data:  # What a shell prints does not count.
                    heard = time.monotonic()
                yield data
            if time.monotonic() - heard > limit_s:
                raise TimeoutError(f"nothing came from there for {limit_s:g} s")

    def _take(self, kind: bytes, number: int, payload: bytes) -> None:
        process = self._processes.get(number)
        if kind == REPORT:
            self.report = json.loads(payload)
            self.problems += self._problems_in(self.report)
            self.ready.set()
        elif kind == REACHED:
            self.answers.put(json.loads(payload))
        elif process is None:
            return
        elif kind == STARTED:
            process.pid = int(payload)
        elif kind in STREAMS:
            process.write(kind, payload)
        elif kind == ENDED:
            process.finish(**json.loads(payload))


def _problems_of_shell(text: bytes) -> list[str]:
    """What the command on the host has found wrong before an agent ran. Other lines are the shell's own."""
    lines = text.decode(errors="replace").splitlines()
    mark = PROBLEM.decode()
    return [line.partition(mark)[2] for line in lines if mark in line]
