"""Sums over ranks of compressed tensors: linear, in two phases, or gathered, as the codec allows.

| codec | class | how | sent by a rank |
| --- | --- | --- | --- |
| linear: low rank, random k | `LinearSum` | all-reduce of the small tensors that the codec makes | as the all-reduce |
| sparse: threshold, top-k, chains | `GatheredSum` | every packet to every rank | P-1 packets |
| others: casts, 1-bit, quantised | `TwoPhaseSum` | reduce-scatter and all-gather of packets | 2 (P-1)/P of a packet |

The choice follows from the codec alone; no all-reduce algorithm is asked for.
"""

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
    """Return the class that sums packets of `codec`."""
    if codec.linear:
        return LinearSum
    return GatheredSum if codec.sparse else TwoPhaseSum
