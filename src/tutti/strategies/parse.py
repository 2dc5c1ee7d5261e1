"""The grammar of strategies at the command line: `name` or `name:option,key=number`, then `+codec` if any."""

from collections.abc import Callable
from functools import partial

from tutti.codecs import Codec, parse_codec
from tutti.errors import ConfigError, UnknownName
from tutti.strategies import auto, averaging, decentralised, parameter_server, poseidon
from tutti.strategies.allreduce import NAMES, Algorithm, AllReduce
from tutti.strategies.base import Strategy

Options = dict[str, str]
"""As they were written: an empty text for what has no number."""


def _all_reduce(algorithm: Algorithm, options: Options, codec: Codec | None) -> Strategy:
    share = options.pop("skip_converged", None)
    numbers = {key: int(number) for key, number in options.items()}
    return AllReduce(algorithm, codec=codec, skip_converged=None if share is None else float(share), **numbers)


STRATEGIES: dict[str, Callable[[Options, Codec | None], Strategy]] = {
    **{name: partial(_all_reduce, name) for name in NAMES},
    "ps": parameter_server.read,
    **averaging.READERS,
    "peers": decentralised.read_peers,
    "gossip": decentralised.read_gossip,
    "poseidon": poseidon.read,
    "auto": auto.read,
}


def as_strategy(strategy: Strategy | str) -> Strategy:
    """Return the strategy itself, or the one that a text such as "bmuf:every=16" names.

    Raises `ConfigError` for what is neither, and what `parse` raises for a text that names no strategy.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if isinstance(strategy, str):
        return parse(strategy)
    raise ConfigError(
        f"strategy must be an object such as tutti.AllReduce('ring') or a text such as 'ring', got {strategy!r}."
    )


def parse(text: str) -> Strategy:
    """The strategy that `text` names; `str` of a strategy gives the text back."""
    own, plus, codec = text.partition("+")
    name, _, rest = own.partition(":")
    if name not in STRATEGIES:
        raise UnknownName("strategy", name, STRATEGIES)
    given = [(key, value) for key, _, value in (part.partition("=") for part in rest.split(",") if part)]
    options = dict(given)
    if len(options) < len(given):
        raise ConfigError(f"strategy '{text}' says one of its options twice.")
    try:
        return STRATEGIES[name](options, parse_codec(codec) if plus else None)
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"strategy '{text}' is not of the form name:key=number+codec, such as ring:bucket_bytes=1000000, "
            "ring+onebit or ps:ssp=3,servers=1, or it has no such key."
        ) from None
