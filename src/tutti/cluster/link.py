"""`Link`: the time a message takes between two ranks, by latency and rate."""

from dataclasses import dataclass

from tutti.cluster.mistakes import Mistakes
from tutti.cluster.quantities import Duration, format_rate, format_time, parse_rate, parse_time


@dataclass(frozen=True, init=False)
class Link:
    """One direction between two ranks: a message of n bytes takes `latency_s + 8 n / bits_per_s` (Hockney 1994).

    In the words of the α–β model, α is `latency_s` and β is `seconds_per_byte`.
    """

    bits_per_s: float
    latency_s: float

    def __init__(self, rate: str | float, latency: Duration = 0.0) -> None:
        """Make a link of that rate ("1gbit", or bits per second) and latency ("50us", or seconds)."""
        mistakes = Mistakes()
        object.__setattr__(self, "bits_per_s", mistakes.attempt(lambda: parse_rate(rate), "rate: "))
        object.__setattr__(self, "latency_s", mistakes.attempt(lambda: parse_time(latency), "latency: "))
        mistakes.report()

    @property
    def seconds_per_byte(self) -> float:
        """Time that one more byte adds to a message."""
        return 8 / self.bits_per_s

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds that a message of `num_bytes` takes."""
        return self.latency_s + num_bytes * self.seconds_per_byte

    def __str__(self) -> str:
        return f"{format_rate(self.bits_per_s)}, {format_time(self.latency_s)}"
