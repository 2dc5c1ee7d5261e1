"""Sums over ranks of what codecs say: in rounds of small sums, in two phases, or by gathering."""

from tutti.codecs.base import Codec
from tutti.collectives.compressed.base import PAUSE, CodedSum, Party
from tutti.collectives.compressed.gathered import GatheredSum
from tutti.collectives.compressed.linear import SumInRounds
from tutti.collectives.compressed.two_phase import TwoPhaseSum

__all__ = ["PAUSE", "CodedSum", "GatheredSum", "Party", "SumInRounds", "TwoPhaseSum", "way_of"]


def way_of(codec: Codec) -> type[CodedSum]:
    """How what `codec` says is summed."""
    if codec.linear:
        return SumInRounds
    return GatheredSum if codec.sparse else TwoPhaseSum
