"""The operation queue of a simulated process group, in virtual time."""

from collections.abc import Callable
from functools import partial

import torch
from torch.autograd import Variable

from tutti.backend.operation_queue import OperationQueue
from tutti.backend.work import BackendWork
from tutti.transports.base import Operation, Transport, Work


class VirtualTimeQueue(OperationQueue):
    """Runs operations on the simulator's transports; the thread that waits for a work completes it.

    Simulated ranks take turns on one processor. Only a wait in virtual time lets the others run, so no other thread
    could complete the work.
    """

    def __init__(self, collectives: Transport, messages: Transport) -> None:
        """Run collectives on one transport and messages on another."""
        self._collectives, self._messages = collectives, messages

    def submit_collective(self, work: BackendWork, operation: Operation, blocking: bool) -> None:
        self._follow(work, lambda: self._collectives.start(operation))
        if blocking:
            work.finish()

    def submit_message(self, work: BackendWork, operation: Operation) -> None:
        self._follow(work, lambda: self._messages.spawn(operation))

    def close(self) -> None:
        return None

    def _follow(self, work: BackendWork, start: Callable[[], Work]) -> None:
        with torch.inference_mode(False):  # Other ranks, which are not in it, run parts of the operation.
            started = start()
        work.poll_with(started.done, partial(_finish, work, started))
        work.on_future = _finish_before_future


def _finish(work: BackendWork, started: Work) -> None:
    failure = None
    try:
        with torch.inference_mode(False):
            started.wait()
    except Exception as error:
        failure = error
    if (set_future := work.complete(failure)) is not None:
        set_future()


def _finish_before_future(work: BackendWork) -> None:
    """Complete a work whose future was taken, before its user waits: virtual time does not pass in such a wait.

    DDP takes futures during backward and waits for them at its end. A callback that is queued here runs before that.
    """
    try:
        Variable._execution_engine.queue_callback(work.finish)
    except RuntimeError:  # There is no backward pass.
        work.finish()
