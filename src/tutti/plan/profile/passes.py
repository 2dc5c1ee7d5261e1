"""Repeated measurements, and the time of an undisturbed forward and backward pass."""

import time
from collections.abc import Callable
from typing import TypeVar

from tutti.plan.profile.clock import Clock
from tutti.plan.profile.training_pass import TrainingPass

T = TypeVar("T")

_MAX_SECONDS = 1.5
"""Time after which no more repetitions are begun, if there are enough."""
_MIN_REPEATS = 3
"""Repetitions of which a median still ignores one that was disturbed."""


def repeated(measure: Callable[[], T], at_most: int) -> list[T]:
    """Repeat a measurement `at_most` times or for 1.5 seconds, but at least three times.

    One more is made first and left out: it warms up caches and kernels.
    """
    measure()
    results: list[T] = []
    start_s = time.monotonic()
    while len(results) < _MIN_REPEATS or (len(results) < at_most and time.monotonic() - start_s < _MAX_SECONDS):
        results.append(measure())
    return results


def forward_and_backward(training_pass: TrainingPass, clock: Clock) -> tuple[float, float]:
    """Return the seconds of forward and of backward, in passes without hooks."""
    clock.settle()
    start = clock.now()
    loss = training_pass.forward()
    middle = clock.now()
    loss.backward()
    end = clock.now()
    clock.settle()
    return clock.seconds(start, middle), clock.seconds(middle, end)
