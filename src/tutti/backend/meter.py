"""Simulated ranks that train with torch.distributed alone: their time passes as operators run."""

import random
import threading
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
        self._rng = random.Random(f"{transport.seed} jitter")
        self._factor = 1.0
        self._draw()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._fake in types:
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


def start(transport: Transport) -> None:
    """From now on, this thread's time passes as its operators run. Once is enough."""
    if getattr(_here, "meter", None) is None and not getattr(_here, "stopped", False):
        _here.meter = Meter(transport)
        _here.meter.__enter__()


def stop() -> None:
    """From now on, somebody else lets this thread's time pass."""
    _here.stopped = True
    if (meter := getattr(_here, "meter", None)) is not None:
        _here.meter = None
        meter.__exit__(None, None, None)


def stepping(*_: Any) -> None:
    """An optimiser of this thread steps."""
    if (meter := getattr(_here, "meter", None)) is not None:
        meter.step()
