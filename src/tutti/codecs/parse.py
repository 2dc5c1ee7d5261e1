"""The grammar of codecs at the command line: `name`, `name:number`, `name:number,key=number`.

A codec named there has error feedback, unless it says `feedback=0`; two with a plus between them are a chain.
"""

import re
from collections.abc import Callable
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
from tutti.errors import ConfigError, UnknownName

CODECS: dict[str, Callable[..., Codec]] = {
    "fp16": partial(Cast, "fp16"),
    "bf16": partial(Cast, "bf16"),
    "fp8": partial(Cast, "fp8"),
    "onebit": OneBit,
    "threshold": Threshold,
    "topk": TopK,
    "randomk": RandomK,
    "quantize": Quantize,
    "lowrank": LowRank,
}

_NO_FEEDBACK = "feedback=0"
_PLUS = re.compile(r"\+(?!\d)")
"""Between two codecs, not within a number such as 1e+16."""


def parse_codec(text: str) -> Codec:
    """The codec that `text` names; `print_codec` gives the text back."""
    forgetful = text.endswith((f":{_NO_FEEDBACK}", f",{_NO_FEEDBACK}"))
    parts = _PLUS.split(text[: -len(_NO_FEEDBACK) - 1] if forgetful else text)
    codecs = [_one(part, text) for part in parts]
    if len(codecs) > 2:
        raise ConfigError(f"codec '{text}' has {len(codecs)} parts; a chain has two, such as topk:0.01+quantize:8.")
    codec = codecs[0] if len(codecs) == 1 else Chain(*codecs)  # type: ignore[arg-type]
    return codec if forgetful else ErrorFeedback(codec)


def print_codec(codec: Codec) -> str:
    """The text that makes this codec."""
    if isinstance(codec, ErrorFeedback):
        return str(codec.inner)
    text = str(codec)
    return f"{text}{',' if ':' in _PLUS.split(text)[-1] else ':'}{_NO_FEEDBACK}"


def _one(part: str, text: str) -> Codec:
    name, colon, rest = part.partition(":")
    if name not in CODECS:
        raise UnknownName("codec", name, CODECS)
    numbers: list[float] = []
    options: dict[str, float] = {}
    try:
        for option in rest.split(",") if colon else []:
            key, equals, number = option.partition("=")
            if equals:
                options[key] = _number(number)
            else:
                numbers.append(_number(key))
        return CODECS[name](*numbers, **options)
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"codec '{text}' is not of the form name:number,key=number, such as topk:0.01, or it has no such key."
        ) from None


def _number(text: str) -> float:
    return int(text) if text.lstrip("-").isdigit() else float(text)
