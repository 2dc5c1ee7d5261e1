"""In which ways a layer's weights can be split."""

from typing import Literal, get_args

ParallelStyle = Literal["colwise", "heads", "rowwise", "vocabulary", "replicate"]
"""What each rank has of a layer: some of its outputs (Shoeybi 2019: columns); some heads of queries, keys and values
that one matrix makes; some of its inputs, so that outputs are summed (rows); some words; or all of it."""

PARALLEL_STYLES: tuple[ParallelStyle, ...] = get_args(ParallelStyle)
