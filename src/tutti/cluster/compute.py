"""Compute times: `Compute` (the speed of ranks), `Jitter` and `Pauses` (its random variation)."""

import math
import random
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from tutti.cluster.mistakes import Mistakes, is_positive, number
from tutti.cluster.quantities import Duration, format_speed, format_time, parse_speed, parse_time
from tutti.errors import UnknownName

Shape = Literal["lognormal", "uniform", "exponential"]

_LEAST = 1e-9
"""Least factor of jitter: every step takes some time."""
_MOST = 5
"""Largest spread of log-normal jitter. A larger one is taken for a percentage that was meant as a share."""


@dataclass(frozen=True, init=False)
class Compute:
    """The computing time of a rank of speed 1."""

    flops: float
    """FLOP/s that the model reaches in fact; used where `sample_s` is None."""
    sample_s: float | None
    """Seconds of forward and backward of one sample, measured or from a table."""
    step_s: float
    """Seconds added to every step, whatever the batch: the optimiser, Python."""
    forward: float
    """The share of `sample_s` that is the forward pass."""

    def __init__(
        self,
        flops: str | float = 1e11,
        sample_s: Duration | None = None,
        step_s: Duration = 0.0,
        forward: float = 1 / 3,
    ) -> None:
        """Make compute times from numbers, or from texts such as "100gflops" and "2ms"."""
        mistakes = Mistakes()
        sample = None if sample_s is None else mistakes.attempt(lambda: parse_time(sample_s), "a sample's time: ")
        object.__setattr__(self, "flops", mistakes.attempt(lambda: parse_speed(flops), "flops: "))
        object.__setattr__(self, "sample_s", sample)
        object.__setattr__(self, "step_s", mistakes.attempt(lambda: parse_time(step_s), "a step's time: "))
        # A third by default: backward computes two products where forward computes one.
        object.__setattr__(self, "forward", forward)
        mistakes.need(sample is None or sample > 0, f"a sample's time must be above 0, got {sample_s!r}")
        mistakes.need(0 <= number(forward) <= 1, f"forward must be from 0 to 1, got {forward!r}")
        mistakes.report()

    def __str__(self) -> str:
        speed = format_speed(self.flops) if self.sample_s is None else f"{format_time(self.sample_s)} a sample"
        step = f", {format_time(self.step_s)} a step" if self.step_s else ""
        return f"{speed}{step}, {100 * self.forward:.0f} % of it forward"


@dataclass(frozen=True)
class Jitter:
    """Random variation: each step's computing time is multiplied by a random factor of mean 1."""

    spread: float
    """Standard deviation of the factors."""
    shape: Shape = "lognormal"
    """"exponential" never falls below 1 - spread: a step that is sometimes late, never early."""

    def __post_init__(self) -> None:
        spread, shapes = number(self.spread), get_args(Shape)
        mistakes = Mistakes()
        mistakes.need(0 <= spread < math.inf, f"jitter's spread must be 0 or more and finite, got {self.spread!r}")
        if self.shape not in shapes:
            mistakes.need(False, str(UnknownName("shape of jitter", str(self.shape), shapes)).rstrip("."))
        if self.shape == "uniform":
            # `not ... >=`: a NaN was reported above, and is not reported twice.
            mistakes.need(not spread * math.sqrt(3) >= 1, f"uniform jitter's spread must be below 0.577, got {spread}")
        if self.shape == "lognormal":
            mistakes.need(
                not _MOST < spread < math.inf,
                f"lognormal jitter's spread must be {_MOST} or less, got {spread:g}: it is a share, 0.1 is 10 %",
            )
        if self.shape == "exponential":
            mistakes.need(not spread > 1, f"exponential jitter's spread must be 1 or less, got {spread}")
        mistakes.report()

    def draw(self, rng: random.Random) -> float:
        """Return a random factor above 0."""
        if self.shape == "uniform":
            # A uniform distribution on [1 - w, 1 + w] has the standard deviation w / √3.
            width = math.sqrt(3) * self.spread
            factor = rng.uniform(1 - width, 1 + width)
        elif self.shape == "exponential":
            # An exponential of mean and deviation `spread`, shifted to the mean 1.
            factor = 1 - self.spread + self.spread * rng.expovariate(1)
        else:
            # σ² = ln(1 + spread²) and μ = -σ² / 2 give the mean 1 and the deviation `spread`.
            variance = 2 * math.log(math.hypot(1, self.spread))
            factor = rng.lognormvariate(-variance / 2, math.sqrt(variance))
        return max(factor, _LEAST)

    def __str__(self) -> str:
        return f"{self.shape} jitter of {self.spread:.3g}"


@dataclass(frozen=True, init=False)
class Pauses:
    """Random stops of a rank: exponential gaps of mean `every_s`, exponential lengths of mean `length_s`."""

    every_s: float
    """Mean time between the end of a pause and the next."""
    length_s: float
    """Mean length of a pause."""

    def __init__(self, every_s: Duration, length_s: Duration) -> None:
        """Make pauses from seconds, or from texts such as "10s" and "200ms"."""
        mistakes = Mistakes()
        for name, given in (("every_s", every_s), ("length_s", length_s)):
            seconds = mistakes.attempt(partial(parse_time, given), f"{name.removesuffix('_s')}: ")
            object.__setattr__(self, name, seconds)
            what = "between pauses" if name == "every_s" else "of a pause"
            mistakes.need(seconds is None or is_positive(seconds), f"the time {what} must be above 0, got {given!r}")
        mistakes.report()

    def __str__(self) -> str:
        return f"pauses of {format_time(self.length_s)} every {format_time(self.every_s)}"
