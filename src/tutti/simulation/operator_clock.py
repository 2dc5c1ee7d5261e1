"""Simulated ranks that train with torch.distributed alone: their time passes as operators run."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from tutti.transports.base import Transport

_here = threading.local()


class Meter(TorchDispatchMode):
    """Counts the floating-point operations of every operator, and lets as much time pass as the cluster says.

    Those that have none, such as a ReLU, are part of the speed that a cluster is said to reach.
    """

    def __init__(self, transport: Transport) -> None:
        super().__init__()
        assert transport.cluster is not None
        from torch._subclasses.fake_tensor import FakeTensor  # These cost a compiler's import.
        from torch.utils.flop_counter import flop_registry

        self._formulas, self._fake = flop_registry, FakeTensor
        self._elapse, self._cluster = transport.elapse, transport.cluster
        self.counts = self.entered = False
        self._rng = random.Random(f"{transport.seed} jitter")
        self._factor = 1.0
        self._draw()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.counts or self._fake in types:
            return func(*args, **kwargs)  # DTensor asks what would become of sizes: nothing is computed.
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # A DTensor: what this rank does for it comes here again.
        result = func(*args, **kwargs)
        if (formula := self._formulas.get(func._overloadpacket)) is not None:
            self._elapse(self._factor * formula(*args, **kwargs, out_val=result) / self._cluster.compute.flops)
        return result

    def step(self) -> None:
        """An optimiser steps: the next step takes longer or less, as the cluster's jitter says."""
        self._elapse(self._factor * self._cluster.compute.step_s)
        self._draw()

    def _draw(self) -> None:
        if self._cluster.jitter is not None:
            self._factor = self._cluster.jitter.draw(self._rng)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


class _Clock:
    """Who lets one thread's time pass."""

    def __init__(self) -> None:
        self.meter: Meter | None = None
        self._num_counting = self._num_otherwise = 0
        self._thread = threading.get_ident()

    def change(self, counting: int = 0, otherwise: int = 0) -> None:
        """So many more want operators counted, or let time pass otherwise."""
        self._num_counting += counting
        self._num_otherwise += otherwise
        if (meter := self.meter) is None:
            return
        meter.counts = self._num_counting > 0 and self._num_otherwise == 0
        if self._thread != threading.get_ident():
            return  # Somebody's end was found by the collector of garbage, wherever that was.
        if meter.counts and not meter.entered:
            meter.__enter__()
            meter.entered = True
        elif meter.entered and not meter.counts and _get_current_dispatch_mode() is meter:  # Else it stays, idle.
            meter.__exit__(None, None, None)
            meter.entered = False


def _clock() -> _Clock:
    if not hasattr(_here, "clock"):
        _here.clock = _Clock()
    clock: _Clock = _here.clock
    return clock


@contextmanager
def counting(transport: Transport) -> Iterator[None]:
    """While this lasts, this thread's time passes as its operators run; once, however many want it."""
    clock = _clock()
    clock.meter = clock.meter or Meter(transport)
    clock.change(counting=1)
    try:
        yield
    finally:
        clock.change(counting=-1)


@contextmanager
def otherwise() -> Iterator[None]:
    """While this lasts, somebody else lets this thread's time pass, whoever wants operators counted."""
    clock = _clock()
    clock.change(otherwise=1)
    try:
        yield
    finally:
        clock.change(otherwise=-1)


def stepping(*_: Any) -> None:
    """An optimiser of this thread steps."""
    if (meter := _clock().meter) is not None and meter.counts:
        meter.step()
