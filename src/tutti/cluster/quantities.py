"""Rates, speeds, times, durations and sizes: read from texts such as "1gbit" or "50us", and printed as such.

Every layer reads its quantities here, so that a text means the same wherever it is accepted.
"""

import re
from datetime import timedelta

from tutti.cluster.mistakes import number
from tutti.errors import ConfigError

Duration = float | str | timedelta
"""A length of time: a number of seconds, a text such as "40s", "500ms" or "5m", or a `datetime.timedelta`."""

_BITS_PER_S = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_FLOPS = {"flops": 1.0, "kflops": 1e3, "mflops": 1e6, "gflops": 1e9, "tflops": 1e12, "pflops": 1e15}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_BYTES = {"": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}

# Minutes and hours only where a duration is wanted: a latency of "1m" is more likely a mistyped millisecond.
_DURATIONS = {**_SECONDS, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}

_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*([a-zµ]*)\s*", re.IGNORECASE)


def parse_rate(text: str | float) -> float:
    """Return bits per second, from a text such as "100mbit" or "2.5gbit"; a number is taken as it is."""
    rate = _parse(text, _BITS_PER_S, "rate", "100mbit, 1gbit or 2.5gbit")
    if not 0 < rate < float("inf"):
        raise ConfigError(f"a rate must be above 0 and finite, got '{text}'; such as 100mbit or 1gbit.")
    return rate


def parse_speed(text: str | float) -> float:
    """Return FLOP/s, from a text such as "100gflops" or "19.5tflops"; a number is taken as it is."""
    speed = _parse(text, _FLOPS, "speed", "100gflops or 19.5tflops")
    if not 0 < speed < float("inf"):
        raise ConfigError(f"a speed must be above 0 and finite, got '{text}'; such as 100gflops or 19.5tflops.")
    return speed


def parse_time(value: Duration) -> float:
    """Return seconds, 0 or more, from a text such as "50us", "1ms" or "2s", a number of seconds or a timedelta."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    return _parse(seconds, _SECONDS, "time", "50us, 1ms or 2s")


def parse_duration(value: Duration, name: str = "timeout") -> timedelta:
    """Return how long to wait, from a number of seconds, a text such as "40s", "500ms" or "5m", or a timedelta.

    A text without a unit is a number of seconds. `name` is what the error calls the value.

    Raises `ConfigError` for what is not above 0 and finite, for booleans, and for units that are not known.
    """
    try:
        if isinstance(value, timedelta):
            duration = value
        else:
            duration = timedelta(seconds=_parse(value, _DURATIONS, "duration", "40s, 500ms or 5m"))
    except (ConfigError, OverflowError):  # A timedelta holds at most 999,999,999 days.
        duration = timedelta(0)
    if duration <= timedelta(0):
        raise ConfigError(
            f"{name} must be a number of seconds above 0, got {value!r}. Texts such as '40s', '500ms', '5m' or '1h' "
            "and datetime.timedelta are accepted too."
        )
    return duration


def parse_size(text: str | int) -> int:
    """Return bytes, from a text such as "64KiB" or "4MB"; a number is taken as it is."""
    return int(_parse(text, _BYTES, "size", "1024, 64KiB or 4MB"))


def format_rate(bits_per_s: float) -> str:
    """Print bits per second in the largest unit below them, such as "2.5gbit"."""
    return _format(bits_per_s, _BITS_PER_S)


def format_speed(flops: float) -> str:
    """Print FLOP/s in the largest unit below them, such as "19.5tflops"."""
    return _format(flops, _FLOPS)


def format_time(seconds: float) -> str:
    """Print seconds in the largest unit below them, such as "50us"."""
    return _format(seconds, {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0})


def format_size(num_bytes: float) -> str:
    """Print bytes in the largest binary unit below them, such as "64 KiB"."""
    return _format(num_bytes, {" B": 1.0, " KiB": 2.0**10, " MiB": 2.0**20, " GiB": 2.0**30})


def _parse(text: str | float, units: dict[str, float], kind: str, examples: str) -> float:
    """Return a number with a unit as a number of the first unit, or a plain number as it is; 0 or more, and finite."""
    # A boolean is an int to Python, and surely a mistake here.
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        value = number(text)
    else:
        match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
        # Whatever the case: a unit such as "Gbit" has one meaning here, and bytes are no unit of a rate.
        unit = match.group(2).lower() if match else None
        if match is None or unit not in units:
            raise ConfigError(f"'{text}' is not a {kind}: write a number and a unit, such as {examples}.")
        value = float(match.group(1)) * units[unit]
    if not 0 <= value < float("inf"):
        raise ConfigError(f"a {kind} must be 0 or more and finite, got '{text}'; such as {examples}.")
    return value


def _format(value: float, units: dict[str, float]) -> str:
    """Print a value with four digits, in the largest of `units`, given in ascending order, that it reaches."""
    name, scale = next(iter(units.items()))
    for unit, size in units.items():
        if value >= size * 0.9995:  # So that 999.96 of a unit, which prints as 1000, becomes 1 of the next.
            name, scale = unit, size
    return f"{value / scale:.4g}{name}"
