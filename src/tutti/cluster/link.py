"""Links: how long a message is on its way; rates, times and sizes as texts."""

import re
from dataclasses import dataclass

from tutti.cluster.mistakes import Mistakes, number
from tutti.errors import ConfigError

_BITS_PER_S = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_FLOPS = {"flops": 1.0, "kflops": 1e3, "mflops": 1e6, "gflops": 1e9, "tflops": 1e12, "pflops": 1e15}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_BYTES = {"": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}

_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*([a-zµ]*)\s*", re.IGNORECASE)


def parse_rate(text: str | float) -> float:
    """Bits a second, from a text such as "100mbit" or "2.5gbit"; numbers pass."""
    rate = _parse(text, _BITS_PER_S, "rate", "100mbit, 1gbit or 2.5gbit")
    if not 0 < rate < float("inf"):
        raise ConfigError(f"a rate must be above 0 and finite, got '{text}'; such as 100mbit or 1gbit.")
    return rate


def parse_speed(text: str | float) -> float:
    """FLOP/s, from a text such as "100gflops" or "19.5tflops"; numbers pass."""
    speed = _parse(text, _FLOPS, "speed", "100gflops or 19.5tflops")
    if not 0 < speed < float("inf"):
        raise ConfigError(f"a speed must be above 0 and finite, got '{text}'; such as 100gflops or 19.5tflops.")
    return speed


def parse_time(text: str | float) -> float:
    """Seconds, from a text such as "50us", "1ms" or "2s"; numbers pass."""
    return _parse(text, _SECONDS, "time", "50us, 1ms or 2s")


def parse_size(text: str | int) -> int:
    """Bytes, from a text such as "64KiB" or "4MB"; numbers pass."""
    return int(_parse(text, _BYTES, "size", "1024, 64KiB or 4MB"))


def format_rate(bits_per_s: float) -> str:
    return _format(bits_per_s, _BITS_PER_S)


def format_speed(flops: float) -> str:
    return _format(flops, _FLOPS)


def format_time(seconds: float) -> str:
    return _format(seconds, {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0})


def format_size(num_bytes: float) -> str:
    return _format(num_bytes, {" B": 1.0, " KiB": 2.0**10, " MiB": 2.0**20, " GiB": 2.0**30})


@dataclass(frozen=True, init=False)
class Link:
    """One direction between two ranks: a message of n bytes takes `latency_s + 8 n / bits_per_s` (Hockney 1994).

    In the words of the α–β model, α is `latency_s` and β is `seconds_per_byte`.
    """

    bits_per_s: float
    latency_s: float

    def __init__(self, rate: str | float, latency: str | float = 0.0) -> None:
        """Make a link of that rate ("1gbit", or bits a second) and latency ("50us", or seconds)."""
        mistakes = Mistakes()
        object.__setattr__(self, "bits_per_s", mistakes.attempt(lambda: parse_rate(rate), "rate: "))
        object.__setattr__(self, "latency_s", mistakes.attempt(lambda: parse_time(latency), "latency: "))
        mistakes.report()

    @property
    def seconds_per_byte(self) -> float:
        return 8 / self.bits_per_s

    def seconds(self, num_bytes: float) -> float:
        """How long a message of `num_bytes` is on its way."""
        return self.latency_s + num_bytes * self.seconds_per_byte

    def __str__(self) -> str:
        return f"{format_rate(self.bits_per_s)}, {format_time(self.latency_s)}"


def _parse(text: str | float, units: dict[str, float], kind: str, examples: str) -> float:
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        value = number(text)
    else:
        match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
        unit = match.group(2).lower() if match else None
        if match is None or unit not in units:
            raise ConfigError(f"'{text}' is not a {kind}: write a number and a unit, such as {examples}.")
        value = float(match.group(1)) * units[unit]
    if not 0 <= value < float("inf"):
        raise ConfigError(f"a {kind} must be 0 or more and finite, got '{text}'; such as {examples}.")
    return value


def _format(value: float, units: dict[str, float]) -> str:
    name, scale = next(iter(units.items()))
    for unit, size in units.items():
        if value >= size * 0.9995:
            name, scale = unit, size
    return f"{value / scale:.4g}{name}"
