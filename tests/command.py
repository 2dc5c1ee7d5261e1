"""What the `call` fixture gives."""

from collections.abc import Callable
from typing import NamedTuple


class Ended(NamedTuple):
    """How a command in this very process ended."""

    status: int
    out: str
    err: str


Call = Callable[..., Ended]
