"""The grammar of codecs at the command line: `name`, `name:number`, `name:number,key=number`.

A codec has error feedback unless its last option is `feedback=0`. Two codecs with a plus between them are a chain.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from functools import partial

from tutti.codecs.base import Codec
from tutti.codecs.cast import Cast
from tutti.codecs.chain import Chain
from tutti.codecs.feedback import ErrorFeedback
from tutti.codecs.lowrank import LowRank
from tutti.codecs.onebit import OneBit
from tutti.codecs.quantize import Quantize
from tutti.codecs.randomk import RandomK
from tutti.codecs.threshold import Threshold
from tutti.codecs.topk import TopK
from tutti.errors import ConfigError
from tutti.plugins import Registry, checked

CODECS: Registry[Callable[..., Codec]] = Registry(
    "codec",
    "tutti.codecs",
    {
        "fp16": partial(Cast, "fp16"),
        "bf16": partial(Cast, "bf16"),
        "fp8": partial(Cast, "fp8"),
        "onebit": OneBit,
        "threshold": Threshold,
        "topk": TopK,
        "randomk": RandomK,
        "quantize": Quantize,
        "lowrank": LowRank,
    },
    callable,
    "a subclass of tutti.codecs.Codec, or a function that returns a codec",
)
"""Functions that make a codec from numbers, by name. Packages add theirs by entry points (group `tutti.codecs`)."""

_NO_FEEDBACK = "feedback=0"

CHAIN_SEPARATOR = re.compile(r"\+(?!\d)")
"""The plus between the two codecs of a chain. A plus before a digit belongs to a number such as 1e+16."""


def parse_codec(text: str) -> Codec:
    """Return the codec that `text` names; `print_codec` gives the text back."""
    body, has_feedback, number = text.partition("feedback=")
    if has_feedback and (number not in ("0", "1") or body[-1:] not in (",", ":")):
        raise ConfigError(f"codec '{text}': feedback=0 or feedback=1 comes last, after a comma or the first colon.")
    parts = CHAIN_SEPARATOR.split(body[:-1] if has_feedback else body)
    codecs = [_parse_one(part) for part in parts]
    if len(codecs) > 2:
        raise ConfigError(f"codec '{text}' has {len(codecs)} parts; a chain has two, such as topk:0.01+quantize:8.")
    codec = codecs[0] if len(codecs) == 1 else Chain(*codecs)  # type: ignore[arg-type]
    return codec if number == "0" else ErrorFeedback(codec)


def print_codec(codec: Codec, more: Sequence[str] = ()) -> str:
    """Return the text that makes this codec.

    Args:
        more: options of the strategy that uses the codec, such as "exact_below=100", printed after the codec's own.
    """
    feedback = isinstance(codec, ErrorFeedback)
    text = str(codec.inner) if isinstance(codec, ErrorFeedback) else str(codec)
    options = [*more] if feedback else [*more, _NO_FEEDBACK]
    if not options:
        return text
    # The last codec of a chain takes the options: a colon starts them unless it has some of its own.
    return f"{text}{',' if ':' in CHAIN_SEPARATOR.split(text)[-1] else ':'}{','.join(options)}"


def _parse_one(part: str) -> Codec:
    """Parse one codec with its options, by the parameters that its class takes."""
    name, colon, rest = part.partition(":")
    make = CODECS.find(name)
    # The parameters of a codec are its options: no other list of them is kept.
    takes = list(inspect.signature(make).parameters)
    has = f"it has {', '.join(takes)}" if takes else "it has none"
    arguments: dict[str, float] = {}
    for number, option in enumerate(rest.split(",") if colon else []):
        first, equals, second = option.partition("=")
        # By name, or by position as in a call.
        key = first if equals else (takes[number] if number < len(takes) else "")
        if key in arguments:
            raise ConfigError(f"codec '{part}' gives its {key} twice.")
        if key not in takes:
            raise ConfigError(f"codec '{part}': '{option}' is none of {name}'s options: {has}.")
        arguments[key] = _number(second if equals else first, part)
    return checked(make(**arguments), Codec, CODECS, name)  # type: ignore[type-abstract]


def _number(text: str, part: str) -> float:
    try:
        # An int where it looks like one: parameters such as `bits` refuse 8.0.
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        raise ConfigError(f"codec '{part}': '{text}' is not a number. Write it as in topk:0.01,momentum=0.9.") from None
