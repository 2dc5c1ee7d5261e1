"""Clocks: when something happened on the CPU, or on a GPU that runs behind it."""

import time
from abc import ABC, abstractmethod
from typing import Any

import torch

Moment = Any
"""The type that `Clock.now` returns; only the same clock can interpret a value of it."""


class Clock(ABC):
    """Records moments without waiting, and tells afterwards how far apart they were."""

    @abstractmethod
    def now(self) -> Moment:
        """Return the moment at which all work submitted so far is done."""

    @abstractmethod
    def seconds(self, earlier: Moment, later: Moment) -> float:
        """Return the seconds between two moments, after `settle`."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until all submitted work is done."""


class WallClock(Clock):
    """The clock of the CPU, on which work is done when its call returns."""

    def now(self) -> Moment:
        return time.perf_counter()

    def seconds(self, earlier: Moment, later: Moment) -> float:
        return float(later - earlier)

    def settle(self) -> None:
        pass


class CudaClock(Clock):
    """The clock of a GPU: moments are events on its stream, so recording one does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Moment:
        # Recorded on the stream that computes: it passes when all kernels submitted before it are done.
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, earlier: Moment, later: Moment) -> float:
        return float(earlier.elapsed_time(later)) / 1e3  # CUDA gives milliseconds.

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)


def clock_of(device: torch.device) -> Clock:
    """Return the clock for computations on a device."""
    return CudaClock(device) if device.type == "cuda" else WallClock()
