"""A thread that takes the steps of collectives while the caller computes."""

import threading
from queue import SimpleQueue

import torch

from tutti.errors import ConfigError, RankLost
from tutti.transports.base import Operation, Work


def take(steps: Operation) -> None:
    """Take all steps, one after the other; what fails is raised where they yielded it."""
    failure: Exception | None = None
    while True:
        try:
            work = next(steps) if failure is None else steps.throw(failure)
        except StopIteration:
            return
        failure = None
        try:
            work.wait()
        except Exception as error:
            failure = error


class _QueuedOperation(Work):
    """Steps that somebody else takes."""

    def __init__(self, steps: Operation) -> None:
        self.steps = steps
        self.over = threading.Event()
        self.error: Exception | None = None

    def done(self) -> bool:
        return self.over.is_set()

    def wait(self) -> None:
        # Needs no deadline: each wait among the steps has one, and closing the transport ends them all.
        self.over.wait()
        if self.error is not None:
            raise self.error


class Background:
    """Takes steps in the order in which they were started, in one thread that is made when it is needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[_QueuedOperation | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._closed = False
        self._lock = threading.Lock()

    def start(self, steps: Operation) -> Work:
        task = _QueuedOperation(steps)
        with self._lock:  # So that nothing can be put after the end that `close` puts.
            if self._closed:
                raise ConfigError(f"{self._name}: this transport is closed.")
            self._queue.put(task)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
        return task

    def interrupt(self) -> None:
        """Take no more steps than are under way. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)

    def close(self) -> None:
        """End the thread. What it waits for must have been made to fail before. Idempotent."""
        self.interrupt()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _work(self) -> None:
        with torch.no_grad():
            while (task := self._queue.get()) is not None:
                if self._closed and self._failure is None:
                    self._failure = self._closed_early()
                if self._failure is None:
                    self._take(task)
                else:  # The conversation broke off: what comes after would be out of step.
                    task.steps.close()
                    task.error = self._failure
                task.over.set()
                del task  # It holds tensors, and the queue may stay empty for long.

    def _take(self, task: _QueuedOperation) -> None:
        try:
            take(task.steps)
        except Exception as error:
            # A step that begins on a closed transport is told of a mistake; here it is the closing that came between.
            told = self._closed and isinstance(error, ConfigError)
            self._failure = task.error = self._closed_early() if told else error

    def _closed_early(self) -> RankLost:
        return RankLost(f"{self._name}: this transport was closed with work still to do.")
