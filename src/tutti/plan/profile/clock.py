"""When something happened: on the processor, or on a GPU that works behind it."""

import time
from abc import ABC, abstractmethod
from typing import Any

import torch

Moment = Any
"""What a clock's `now` returns; only that clock can read it."""


class Clock(ABC):
    """Notes moments quickly, and says afterwards how far apart they were."""

    @abstractmethod
    def now(self) -> Moment:
        """The moment at which all that was asked for so far is done."""

    @abstractmethod
    def seconds(self, earlier: Moment, later: Moment) -> float:
        """Between two moments, once `settle` was called."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until all that was asked for is done."""


class WallClock(Clock):
    """Of a processor: what was asked for is done when the call returns."""

    def now(self) -> Moment:
        return time.perf_counter()

    def seconds(self, earlier: Moment, later: Moment) -> float:
        return float(later - earlier)

    def settle(self) -> None:
        pass


class CudaClock(Clock):
    """Of a GPU: moments are events among its kernels, so that to note one makes nothing wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Moment:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, earlier: Moment, later: Moment) -> float:
        return float(earlier.elapsed_time(later)) / 1e3

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)


def clock_of(device: torch.device) -> Clock:
    """The clock that a device's computations go by."""
    return CudaClock(device) if device.type == "cuda" else WallClock()
