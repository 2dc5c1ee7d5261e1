"""The grammar of strategies at the command line."""

from collections.abc import Callable

from tutti.errors import UnknownName
from tutti.strategies.allreduce import AllReduce
from tutti.strategies.base import Strategy

STRATEGIES: dict[str, Callable[[], Strategy]] = {"native": AllReduce}


def parse(text: str) -> Strategy:
    """The strategy that `text` names; `str` of a strategy gives the text back."""
    if text not in STRATEGIES:
        raise UnknownName("strategy", text, STRATEGIES)
    return STRATEGIES[text]()
