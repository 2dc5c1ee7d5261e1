"""Collective operations: plain functions over a transport, each with its cost beside it."""

from tutti.collectives.broadcast import broadcast_all
from tutti.collectives.choose import Choice, as_seen_by, choices
from tutti.collectives.clocks import clocks_ahead
from tutti.collectives.collective import Collective
from tutti.collectives.hierarchical import cheapest
from tutti.collectives.links import Fit, LinkMeasurement, measure_links
from tutti.collectives.mean import mean
from tutti.collectives.messages import gather_json, share_json
from tutti.collectives.native import own_sums
from tutti.collectives.registry import (
    ALGORITHMS,
    all_gather,
    broadcast,
    butterfly,
    hierarchical,
    native,
    recursive_doubling,
    reduce_scatter,
    ring,
    ring_blocking,
    tree,
)
from tutti.collectives.steps import own_part, parts, run

__all__ = [
    "ALGORITHMS",
    "Choice",
    "Collective",
    "Fit",
    "LinkMeasurement",
    "all_gather",
    "as_seen_by",
    "broadcast",
    "broadcast_all",
    "butterfly",
    "cheapest",
    "choices",
    "clocks_ahead",
    "gather_json",
    "hierarchical",
    "mean",
    "measure_links",
    "native",
    "own_part",
    "own_sums",
    "parts",
    "recursive_doubling",
    "reduce_scatter",
    "ring",
    "ring_blocking",
    "run",
    "share_json",
    "tree",
]
