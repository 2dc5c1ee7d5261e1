"""Operations of a group in virtual time: the transport takes their steps, whoever waits for them ends them."""

from collections.abc import Callable
from functools import partial

from torch.autograd import Variable

from tutti.backend.operation_queue import OperationQueue
from tutti.backend.work import BackendWork
from tutti.transports.base import Operation, Transport, Work


class VirtualTimeQueue(OperationQueue):
    """Simulated ranks share one processor: nothing but a wait in virtual time lets the others run."""

    def __init__(self, collectives: Transport, messages: Transport) -> None:
        self._collectives, self._messages = collectives, messages

    def collective(self, operation: BackendWork, steps: Operation, here: bool) -> None:
        self._follow(operation, lambda: self._collectives.start(steps))
        if here:
            operation.finish()

    def message(self, operation: BackendWork, steps: Operation) -> None:
        self._follow(operation, lambda: self._messages.spawn(steps))

    def close(self) -> None:
        return None

    def _follow(self, operation: BackendWork, start: Callable[[], Work]) -> None:
        work = start()
        operation.follow(work.done, partial(_finish, operation, work))
        operation.expected = _expect


def _finish(operation: BackendWork, work: Work) -> None:
    failure = None
    try:
        work.wait()
    except Exception as error:
        failure = error
    if (tell := operation.conclude(failure)) is not None:
        tell()


def _expect(operation: BackendWork) -> None:
    """Somebody waits for a future, where virtual time does not pass: end the operation before that.

    DDP takes futures during backward and waits for them after it.
    """
    try:
        Variable._execution_engine.queue_callback(operation.finish)
    except RuntimeError:  # There is no backward pass.
        operation.finish()
