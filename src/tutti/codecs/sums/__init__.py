"""Sums over ranks of what codecs say: in rounds of small sums, in two phases, or by gathering."""

from tutti.codecs.base import Codec, Linear, Places
from tutti.codecs.sums.base import CodedSum, Party
from tutti.codecs.sums.gathered import GatheredSum
from tutti.codecs.sums.in_rounds import SumInRounds
from tutti.codecs.sums.two_phase import TwoPhaseSum

__all__ = ["CodedSum", "GatheredSum", "Party", "SumInRounds", "TwoPhaseSum", "coded_sum"]


def coded_sum(codec: Codec, places: Places, numel: int, party: Party) -> CodedSum:
    """The way in which `codec` sums a flat tensor of `numel` elements that holds tensors at these places."""
    if isinstance(codec, Linear) and codec.linear:
        return SumInRounds(codec, places, numel, party)
    way = GatheredSum if codec.sparse else TwoPhaseSum
    return way(codec, places, numel, party)
