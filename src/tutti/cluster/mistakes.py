"""Everything that is wrong with what was given, in one error."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

from tutti.errors import ConfigError

T = TypeVar("T")


class Mistakes:
    """A list of them that becomes one error."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def need(self, fine: bool, mistake: str) -> None:
        """Note the mistake unless all is fine."""
        if not fine:
            self._found.append(mistake)

    def attempt(self, make: Callable[[], T], where: str = "") -> T | None:
        """What `make` returns; None if it refuses, with its reason noted."""
        try:
            return make()
        except ConfigError as error:
            self._found += [where + line.strip().rstrip(".") for line in str(error).splitlines()]
            return None

    def report(self, where: str = "") -> None:
        """Raise the error, if there is anything to say: a line for each mistake."""
        if not self._found:
            return
        between = "\n  " if where else "\n"
        several = between if where and len(self._found) > 1 else " " if where else ""
        raise ConfigError(where + several + between.join(f"{mistake}." for mistake in self._found))


def is_count(value: Any, least: float = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_positive(value: Any) -> bool:
    return 0 < number(value) < math.inf


def is_name(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and value.strip() != ""


def number(value: Any) -> float:
    """As a float; NaN, which is in no range, for what is no number."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf
