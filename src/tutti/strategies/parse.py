"""The grammar of strategies at the command line: `name` or `name:key=number,key=number`, then `+codec` if any."""

from collections.abc import Callable
from functools import partial

from tutti.codecs import parse_codec
from tutti.errors import ConfigError, UnknownName
from tutti.strategies.allreduce import NAMES, AllReduce
from tutti.strategies.base import Strategy

STRATEGIES: dict[str, Callable[..., Strategy]] = {name: partial(AllReduce, name) for name in NAMES}


def parse(text: str) -> Strategy:
    """The strategy that `text` names; `str` of a strategy gives the text back."""
    own, plus, codec = text.partition("+")
    name, _, rest = own.partition(":")
    if name not in STRATEGIES:
        raise UnknownName("strategy", name, STRATEGIES)
    try:
        options = {key: int(number) for key, number in (part.split("=") for part in rest.split(",") if part)}
        return STRATEGIES[name](**options, **({"codec": parse_codec(codec)} if plus else {}))
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"strategy '{text}' is not of the form name:key=number+codec, such as ring:bucket_bytes=1000000 or "
            "ring+onebit, or it has no such key."
        ) from None
