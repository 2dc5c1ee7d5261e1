"""Sums over ranks of what codecs say: in rounds of small sums, in two phases, or by gathering."""

from tutti.codecs.base import Codec
from tutti.collectives.compressed.base import STAGE_BOUNDARY, CompressedSum, ReductionContext
from tutti.collectives.compressed.gathered import GatheredSum
from tutti.collectives.compressed.linear import LinearSum
from tutti.collectives.compressed.two_phase import TwoPhaseSum

__all__ = [
    "STAGE_BOUNDARY",
    "CompressedSum",
    "GatheredSum",
    "LinearSum",
    "ReductionContext",
    "TwoPhaseSum",
    "compressed_sum_for",
]


def compressed_sum_for(codec: Codec) -> type[CompressedSum]:
    """How what `codec` says is summed."""
    if codec.linear:
        return LinearSum
    return GatheredSum if codec.sparse else TwoPhaseSum
