"""Intervals between checkpoints, by steps or by time, as a user gives them. Imports no torch."""

import re
from contextlib import suppress
from datetime import timedelta

from tutti.cluster import parse_duration
from tutti.errors import ConfigError

Every = int | str | timedelta
"""How often to write: a number of steps, a text such as "5m" or "500" (steps), or a timedelta."""


def parse_every(every: Every, name: str = "checkpoint: every") -> int | float:
    """Return a number of steps as an int, or seconds as a float. `name` is what the error calls the value."""
    if isinstance(every, str) and re.fullmatch(r"\s*[0-9]+\s*", every):
        every = int(every)
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return every
    with suppress(ConfigError):
        if isinstance(every, str | timedelta):
            return parse_duration(every, name).total_seconds()
    raise ConfigError(f"{name} must be a number of steps, 1 or more, or a time such as 30s, 5m or 1h; got {every!r}.")
