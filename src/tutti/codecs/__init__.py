"""Codecs: compress a tensor to a packet of bytes, and decode it again.

A codec is a frozen record. What it remembers between calls is a state that is passed in and handed back.
`ErrorFeedback` wraps any codec, and adds what was lost in one call to the next. Sums of packets over ranks are in
`tutti.collectives.compressed`.
"""

from tutti.codecs.base import Codec, CodecSpeed, LinearCodec, Packet, State
from tutti.codecs.cast import Cast
from tutti.codecs.chain import Chain
from tutti.codecs.feedback import ErrorFeedback
from tutti.codecs.lowrank import LowRank
from tutti.codecs.onebit import OneBit
from tutti.codecs.parse import CODECS, parse_codec, print_codec
from tutti.codecs.quantize import Quantize
from tutti.codecs.randomk import RandomK
from tutti.codecs.scale_groups import ScaleGroups
from tutti.codecs.threshold import Threshold
from tutti.codecs.topk import TopK

__all__ = [
    "CODECS",
    "Cast",
    "Chain",
    "Codec",
    "CodecSpeed",
    "ErrorFeedback",
    "LinearCodec",
    "LowRank",
    "OneBit",
    "Packet",
    "Quantize",
    "RandomK",
    "ScaleGroups",
    "State",
    "Threshold",
    "TopK",
    "parse_codec",
    "print_codec",
]
