"""`WorkerReader`: reads what workers print and report, and what the fork server says of their ends.

How it works. One selector holds, for each worker, its two outputs and its supervisor pipe, and the connection to the
fork server if there is one. A file is closed at its end, so a run that starts many workers does not run out of files.
The end of a pipe says nothing about its worker, whose children may hold it open.
"""

import os
import selectors
import time
from collections.abc import Callable, Sequence

from tutti.launch.launcher import Launcher
from tutti.launch.supervised_worker import POLL_S, SupervisedWorker
from tutti.launch.supervisor_pipe import Watcher


class WorkerReader:
    """Reads for a supervisor, in its thread."""

    def __init__(self, launcher: Launcher, watch: Watcher | None, before_output: Callable[[], None]) -> None:
        """Call `watch` with what workers report, and `before_output` before one of their lines is printed."""
        self._selector = selectors.DefaultSelector()
        self._launcher, self._watch, self._before_output = launcher, watch, before_output
        self._watches_channel = False

    def add(self, worker: SupervisedWorker) -> None:
        """Read from one more worker."""
        for file in (*worker.outputs, worker.pipe):
            self._selector.register(file, selectors.EVENT_READ, worker)
        channel = self._launcher.ends
        if channel is not None and not self._watches_channel:
            self._watches_channel = True
            self._selector.register(channel, selectors.EVENT_READ)

    def read(self, seconds: float) -> None:
        """Handle what has come from workers and from the fork server; wait `seconds` for it at most."""
        for key, _ in self._selector.select(seconds):
            worker: SupervisedWorker | None = key.data
            if worker is None:
                self._receive_ends()
                continue
            data = os.read(key.fd, 65536)
            # All writers are closed, those of the worker's own children included. Whether the worker has ended is seen
            # from its process, not from here.
            if not data:
                self._close(key.fd, worker)
            elif key.fd == worker.pipe:
                for values in worker.inbox.feed(data):
                    if self._watch is not None:
                        self._watch(worker.number, values)
            else:
                self._before_output()
                worker.outputs[key.fd].write(data)

    def read_pipe(self, worker: SupervisedWorker) -> None:
        """Read all that a worker which has ended had reported.

        Judged without it, a worker that failed because of another would look like a cause.
        """
        while any(key.data is worker and key.fd == worker.pipe for key, _ in self._selector.select(0)):
            self.read(0)

    def drain(self, seconds: float) -> None:
        """Read what is left. A worker's own children may hold its pipes open: wait no longer than `seconds`."""
        deadline = time.monotonic() + seconds
        # The fork server's connection, which has no data, stays open: only the pipes of workers count.
        while any(key.data is not None for key in self._selector.get_map().values()) and time.monotonic() < deadline:
            self.read(POLL_S)

    def close(self, workers: Sequence[SupervisedWorker]) -> None:
        """Print unfinished lines, and close all files."""
        for worker in workers:
            for file in (*worker.outputs, worker.pipe):
                key = self._selector.get_map().get(file)
                if key is not None and key.data is worker:  # Another worker may have a file of the same number by now.
                    self._close(file, worker)
        self._selector.close()

    def _close(self, file: int, worker: SupervisedWorker) -> None:
        self._selector.unregister(file)
        if file in worker.outputs:
            worker.outputs[file].finish()
        os.close(file)

    def _receive_ends(self) -> None:
        """Take in what the fork server reports: `poll` of a forked process then knows its status."""
        channel = self._launcher.ends
        assert channel is not None
        channel.receive()
        if channel.server_ended:  # It stays readable for ever.
            self._selector.unregister(channel)
