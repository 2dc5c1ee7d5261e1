"""`Mistakes`: collects everything that is wrong with the input, and raises it as one error."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

from tutti.errors import ConfigError

T = TypeVar("T")


class Mistakes:
    """A list of mistakes that becomes one `ConfigError`."""

    def __init__(self) -> None:
        self._mistakes: list[str] = []

    def need(self, condition: bool, mistake: str) -> None:
        """Note the mistake unless the condition holds."""
        if not condition:
            self._mistakes.append(mistake)

    def attempt(self, make: Callable[[], T], where: str = "") -> T | None:
        """Return what `make` returns; if it raises `ConfigError`, note its lines after `where` and return None."""
        try:
            return make()
        except ConfigError as error:
            self._mistakes += [where + line.strip().rstrip(".") for line in str(error).splitlines()]
            return None

    def report(self, where: str = "") -> None:
        """Raise one `ConfigError` with a line for each mistake, if there are any."""
        if not self._mistakes:
            return
        between = "\n  " if where else "\n"
        several = between if where and len(self._mistakes) > 1 else " " if where else ""
        raise ConfigError(where + several + between.join(f"{mistake}." for mistake in self._mistakes))


def is_count(value: Any, least: float = 1) -> bool:
    """Whether `value` is an integer, not a boolean, of `least` or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_positive(value: Any) -> bool:
    """Whether `value` is a finite number above 0."""
    return 0 < number(value) < math.inf


def is_name(value: Any) -> bool:
    """Whether `value` is a printable text that is not blank."""
    return isinstance(value, str) and value.isprintable() and value.strip() != ""


def number(value: Any) -> float:
    """Return `value` as a float; NaN, which is in no range, for what is no number."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # An int beyond the largest float.
        return math.inf
