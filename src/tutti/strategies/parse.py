"""The grammar of strategies at the command line.

| text | strategy |
| --- | --- |
| `ring`, `tree:bucket_bytes=1000000` | all-reduce of exact gradients by the named algorithm |
| `onebit`, `topk:0.01,exact_below=100` | all-reduce of gradients that the named codec compresses |
| `ps:ssp=3,servers=1`, `bmuf:every=16` | another strategy with its options |
| `ps:async+onebit` | the same with a codec, where the strategy takes one |

Text is parsed here and nowhere else: everything behind the command line passes `Strategy` objects.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from tutti.codecs import CODECS, Codec, parse_codec
from tutti.codecs.parse import CHAIN_SEPARATOR
from tutti.collectives import ALGORITHMS
from tutti.errors import ConfigError
from tutti.plugins import Registry, checked
from tutti.strategies import averaging, decentralised, parameter_server, poseidon
from tutti.strategies.allreduce import NAMES, OPTIONS, AllReduce
from tutti.strategies.base import Strategy

Options = dict[str, str]
"""Options by key, as they were written. An option without a number has an empty text."""


def _all_reduce(algorithm: str, options: Options, codec: Codec | None) -> Strategy:
    """Make an exact all-reduce; refuse a codec, because compressed sums do not use the algorithm."""
    if codec is not None:
        wanted = AllReduce(codec=codec, **_numbers(options))
        raise ConfigError(
            f"'{algorithm}' and a codec do not go together: compressed gradients are not summed by an all-reduce "
            f"algorithm, so '{algorithm}' would change nothing. Write '{wanted}'."
        )
    return AllReduce(algorithm, **_numbers(options))


def _numbers(options: Options) -> dict[str, Any]:
    """Convert the texts of `AllReduce` options; `skip_converged` is the one that is not a whole number."""
    return {key: float(text) if key == "skip_converged" else int(text) for key, text in options.items()}


def _is_reader(entry: Any) -> bool:
    """Whether an entry can be called with options and a codec; a strategy's class cannot."""
    return callable(entry) and not isinstance(entry, type)


STRATEGIES: Registry[Callable[[Options, Codec | None], Strategy]] = Registry(
    "strategy",
    "tutti.strategies",
    {
        **{name: partial(_all_reduce, name) for name in NAMES},
        "ps": parameter_server.read,
        **averaging.READERS,
        "peers": decentralised.read_peers,
        "gossip": decentralised.read_gossip,
        "poseidon": poseidon.read,
        "auto": "tutti.plan.auto:read",  # The planner is above strategies: it is imported when it is asked for.
    },
    _is_reader,
    "a function of options (dict[str, str]) and a codec (or None) that returns a tutti.strategies.Strategy",
    # Their texts name strategies, too. A package must not change what such a text means.
    reserved=[*CODECS.built_in, *ALGORITHMS.built_in],
)
"""Functions that make a strategy from its options and its codec, by name. Packages add theirs by entry points of the
group `tutti.strategies`. The name of an all-reduce algorithm or of a codec is a strategy, too."""


def is_strategy_name(name: str) -> bool:
    """Whether a strategy's text may begin with `name`."""
    return any(name in registry for registry in (STRATEGIES, CODECS, ALGORITHMS))


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
    """Return the strategy that `text` names; `str` of a strategy gives the text back."""
    name = re.split("[:+]", text, maxsplit=1)[0]
    if not is_strategy_name(name):
        raise STRATEGIES.unknown(name, known={**dict.fromkeys(CODECS), **dict.fromkeys(ALGORITHMS)})
    try:
        # A name that is both a strategy and a codec is the strategy.
        return _parse_codec_text(text) if name not in STRATEGIES and name in CODECS else _parse_named(name, text)
    except (TypeError, ValueError) as error:
        # A `ConfigError` is a `ValueError`, and says more than the general message below.
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"strategy '{text}' is not of the form name:key=number+codec, such as ring:bucket_bytes=1000000, "
            "onebit or ps:ssp=3,servers=1, or it has no such key."
        ) from None


def _parse_named(name: str, text: str) -> Strategy:
    """Parse `name:options+codec`."""
    # At the first plus: the codec may be a chain, with a plus of its own.
    before_codec, plus, codec = text.partition("+")
    options = _unique(text, before_codec.partition(":")[2].split(","))
    read = STRATEGIES[name] if name in STRATEGIES else partial(_all_reduce, name)
    strategy = read(options, parse_codec(codec) if plus else None)
    return checked(strategy, Strategy, STRATEGIES, name)  # type: ignore[type-abstract]


def _parse_codec_text(text: str) -> Strategy:
    """Parse a codec's text among whose options are some of `AllReduce`: `topk:0.01,exact_below=100+quantize:8`."""
    codecs: list[str] = []
    strategy_options: list[str] = []
    for part in CHAIN_SEPARATOR.split(text):
        name, colon, rest = part.partition(":")
        options = rest.split(",") if colon else []
        # Options of `AllReduce` may follow any codec of a chain; all others belong to that codec.
        strategy_options += [option for option in options if option.partition("=")[0] in OPTIONS]
        codec_options = [option for option in options if option.partition("=")[0] not in OPTIONS]
        codecs.append(f"{name}:{','.join(codec_options)}" if codec_options else name)
    return AllReduce(codec=parse_codec("+".join(codecs)), **_numbers(_unique(text, strategy_options)))


def _unique(text: str, parts: list[str]) -> Options:
    """Return options by key, and raise if one is given twice."""
    pairs = [(key, value) for key, _, value in (part.partition("=") for part in parts if part)]
    options = dict(pairs)
    if len(options) < len(pairs):
        raise ConfigError(f"strategy '{text}' says one of its options twice.")
    return options
