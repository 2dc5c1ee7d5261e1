"""Take measurements often enough, and of whole passes."""

import time
from collections.abc import Callable
from typing import TypeVar

from tutti.plan.profile.clock import Clock
from tutti.plan.profile.problem import Problem

T = TypeVar("T")

_ENOUGH_S = 1.5
_LEAST = 3


def rounds(take: Callable[[], T], at_most: int) -> list[T]:
    """Take a measurement up to so many times, or for a second and a half, but three times at least.

    The first is left out: caches and kernels have yet to be warm.
    """
    take()
    taken: list[T] = []
    start_s = time.monotonic()
    while len(taken) < _LEAST or (len(taken) < at_most and time.monotonic() - start_s < _ENOUGH_S):
        taken.append(take())
    return taken


def forward_and_backward(problem: Problem, clock: Clock) -> tuple[float, float]:
    """Seconds of each, in a pass that nothing disturbs."""
    clock.settle()
    start = clock.now()
    loss = problem.forward()
    middle = clock.now()
    loss.backward()
    end = clock.now()
    clock.settle()
    return clock.seconds(start, middle), clock.seconds(middle, end)
