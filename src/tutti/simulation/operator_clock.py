"""`OperatorClock`: advances a simulated rank's clock as operators run, in programs that use torch.distributed alone.

How it works
------------
`counting` is entered for as long as a simulated rank has a process group. An `OperatorClock` is then a dispatch mode of
the rank's thread: it sees every operator, looks up its floating-point operations, and advances the clock.
`suspended` is entered where something else advances the clock (`ComputeClock`); it wins over `counting`.

Both may be entered several times and left in any order, so each thread counts them (`_ThreadClock`). A dispatch mode
can only be left when it is the innermost one. Where another is on top of it, or where the garbage collector ends a
group in another thread, the mode stays on the stack and does nothing (`active` is False).
"""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from tutti.transports.base import Transport

_thread_local = threading.local()


class OperatorClock(TorchDispatchMode):
    """Counts the floating-point operations of every operator, and advances the rank's clock by their time.

    Operators without a count, such as a ReLU, take no time: they are part of the speed that the cluster states.
    """

    def __init__(self, transport: Transport) -> None:
        super().__init__()
        assert transport.cluster is not None
        from torch._subclasses.fake_tensor import FakeTensor  # They import a compiler, which is slow.
        from torch.utils.flop_counter import flop_registry

        self._formulas, self._fake = flop_registry, FakeTensor
        self._elapse, self._cluster = transport.elapse, transport.cluster
        self.active = self.entered = False
        self._rng = random.Random(f"{transport.seed} jitter")
        self._factor = 1.0
        self._draw()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.active or self._fake in types:  # A FakeTensor: DTensor asks for sizes, nothing is computed.
            return func(*args, **kwargs)
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # A DTensor: the operators on its local tensor come here again.
        # Dispatch modes are off inside `__torch_dispatch__`, so this call does not come here again.
        result = func(*args, **kwargs)
        if (formula := self._formulas.get(func._overloadpacket)) is not None:
            # Formulas are torch's own (`torch.utils.flop_counter`), by operator; some need the result's shape.
            self._elapse(self._factor * formula(*args, **kwargs, out_val=result) / self._cluster.compute.flops)
        return result

    def step(self) -> None:
        """Advance the clock by a step of the optimiser, and draw the jitter of the next one."""
        self._elapse(self._factor * self._cluster.compute.step_s)
        self._draw()

    def _draw(self) -> None:
        if self._cluster.jitter is not None:
            self._factor = self._cluster.jitter.draw(self._rng)


# Types on which an operator computes by itself, with no subclass to take it apart.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class _ThreadClock:
    """The operator clock of one thread, and the numbers of contexts that count and that suspend."""

    def __init__(self) -> None:
        self.mode: OperatorClock | None = None
        self._num_counting = self._num_suspended = 0
        self._thread = threading.get_ident()

    def change(self, counting: int = 0, suspended: int = 0) -> None:
        """Add to the numbers of those that count and suspend, and switch the dispatch mode accordingly."""
        self._num_counting += counting
        self._num_suspended += suspended
        if (mode := self.mode) is None:
            return
        # Set in any thread: an inactive mode on the stack does nothing.
        mode.active = self._num_counting > 0 and self._num_suspended == 0
        if self._thread != threading.get_ident():
            return  # Called by the garbage collector, in whatever thread that runs.
        if mode.active and not mode.entered:
            mode.__enter__()
            mode.entered = True
        elif mode.entered and not mode.active and _get_current_dispatch_mode() is mode:
            # Where another mode is on top of it, it stays on the stack, inactive.
            mode.__exit__(None, None, None)
            mode.entered = False


def _clock() -> _ThreadClock:
    """Return the clock of this thread."""
    if not hasattr(_thread_local, "clock"):
        _thread_local.clock = _ThreadClock()
    clock: _ThreadClock = _thread_local.clock
    return clock


@contextmanager
def counting(transport: Transport) -> Iterator[None]:
    """Advance this thread's virtual time as its operators run. May be nested; time passes once."""
    clock = _clock()
    # One mode per thread: groups within groups must not count an operator twice.
    clock.mode = clock.mode or OperatorClock(transport)
    clock.change(counting=1)
    try:
        yield
    finally:
        clock.change(counting=-1)


@contextmanager
def suspended() -> Iterator[None]:
    """Count no operators in this thread, because something else advances its virtual time."""
    clock = _clock()
    clock.change(suspended=1)
    try:
        yield
    finally:
        clock.change(suspended=-1)


def on_optimizer_step(*_: Any) -> None:
    """Advance the clock by a step of an optimiser of this thread, if operators are counted. A hook of torch's."""
    if (mode := _clock().mode) is not None and mode.active:
        mode.step()
