"""Who takes the steps of a group's operations: collectives one after the other, messages beside each other."""

import threading
from abc import ABC, abstractmethod
from functools import partial
from queue import SimpleQueue
from weakref import WeakSet

import torch

from tutti.backend.work import Operation
from tutti.errors import ConfigError, RankLost
from tutti.transports.background import take
from tutti.transports.base import Prompt, Steps, Transport


class Lane(ABC):
    """Takes steps, and tells their operation when they are over."""

    @abstractmethod
    def collective(self, operation: Operation, steps: Steps, here: bool) -> None:
        """Take `steps` after those of the collectives before; `here`: the caller waits anyway."""

    @abstractmethod
    def message(self, operation: Operation, steps: Steps) -> None:
        """Take `steps` of a message beside everything else."""

    @abstractmethod
    def close(self) -> None:
        """Take no more; what is under way fails. The transport has been interrupted before. Idempotent."""


def _told(operation: Operation, steps: Steps) -> Steps:
    """The same steps, and then their operation is over."""
    try:
        yield from steps
    except Exception as error:
        operation.conclude(error)
        raise
    except GeneratorExit:
        operation.conclude(_closed())
        raise
    operation.conclude()


def _closed() -> RankLost:
    return RankLost("this process group was destroyed with a message still under way.")


class RealLane(Lane):
    """Collectives that the caller waits for are done by the caller, others by a thread that is made when it is needed.

    Messages are moved by the thread of their own transport.
    """

    def __init__(self, messages: Transport, name: str) -> None:
        self._send = messages.promptly if isinstance(messages, Prompt) else partial(messages.beside, patiently=True)
        self._name, self._patience_s = name, messages.timeout.total_seconds()
        self._queue: SimpleQueue[tuple[Operation, Steps] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # Held by who takes steps.
        self._num_pending = 0
        self._failure: Exception | None = None
        self._closed = False
        self._underway: WeakSet[Operation] = WeakSet()  # Of messages.

    def collective(self, operation: Operation, steps: Steps, here: bool) -> None:
        with self._lock:
            if self._failure is not None:
                operation.conclude(self._failure)
                return
            here = here and self._num_pending == 0
            self._num_pending += 1
            if here:
                self._turn.acquire()  # Nobody has it: nothing is pending.
            else:
                self._queue.put((operation, steps))
                self._start_thread()
        if here:
            try:
                error = self._take(steps)
            finally:
                self._turn.release()
            operation.conclude(error)

    def message(self, operation: Operation, steps: Steps) -> None:
        operation.patience_s = self._patience_s  # Its steps have no deadline.
        self._send(_told(operation, steps))
        self._underway.add(operation)

    def close(self) -> None:
        with self._lock:
            self._failure = ConfigError(f"{self._name}: this process group was destroyed.")
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for operation in list(self._underway):  # Steps that were never begun tell nobody.
            operation.conclude(_closed())

    def _start_thread(self) -> None:
        if self._thread is None:
            with_threads = (torch.get_num_threads(),)
            self._thread = threading.Thread(target=self._work, args=with_threads, name=self._name, daemon=True)
            self._thread.start()

    def _work(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # As in the thread that asks: each has its own number.
        while (task := self._queue.get()) is not None:
            operation, steps = task
            with self._turn:
                error = self._take(steps)
            operation.conclude(error)  # Not in turn: who is told may ask for more.
            del task, operation, steps  # They hold tensors, and the queue may stay empty for long.

    def _take(self, steps: Steps) -> Exception | None:
        """Take all of them, unless something before them failed; what went wrong."""
        error = self._failure  # Of what came before: this would be out of step.
        if error is None:
            try:
                with torch.no_grad():
                    take(steps)
            except Exception as failure:
                error = failure
        with self._lock:
            self._num_pending -= 1
            self._failure = self._failure or error
        return error
