"""`ParallelStyle`: the ways in which tensor parallelism can divide the weights of one layer."""

from typing import Literal, get_args

ParallelStyle = Literal["colwise", "heads", "rowwise", "vocabulary", "replicate"]
"""The part of a layer that each rank holds.

- `colwise`: some outputs (column parallel, Shoeybi et al. 2019).
- `heads`: some attention heads of a matrix that computes queries, keys and values at once.
- `rowwise`: some inputs; the outputs are summed over ranks (row parallel).
- `vocabulary`: some words of an embedding; the vectors are summed over ranks.
- `replicate`: everything.
"""

PARALLEL_STYLES: tuple[ParallelStyle, ...] = get_args(ParallelStyle)
"""All styles."""
