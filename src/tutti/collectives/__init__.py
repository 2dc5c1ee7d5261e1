"""Collective operations: plain functions over a transport, each beside its cost formula.

All-reduce algorithms are in `ALGORITHMS` (ring, tree, butterfly, recursive doubling, two levels, the transport's own).
`measure_collectives` measures the link and says which of them is cheapest. `compressed` sums packets of codecs.
"""

from tutti.collectives.broadcast import broadcast_all
from tutti.collectives.choose import CollectiveChoice, link_as_used_by, measure_collectives
from tutti.collectives.clocks import clock_offsets
from tutti.collectives.collective import Collective
from tutti.collectives.hierarchical import cheapest
from tutti.collectives.links import LinkFit, LinkMeasurement, measure_links
from tutti.collectives.mean import mean
from tutti.collectives.messages import all_gather_json, broadcast_json
from tutti.collectives.native import native_all_reduce
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
from tutti.collectives.steps import local_part, parts, run

__all__ = [
    "ALGORITHMS",
    "Collective",
    "CollectiveChoice",
    "LinkFit",
    "LinkMeasurement",
    "all_gather",
    "all_gather_json",
    "broadcast",
    "broadcast_all",
    "broadcast_json",
    "butterfly",
    "cheapest",
    "clock_offsets",
    "hierarchical",
    "link_as_used_by",
    "local_part",
    "mean",
    "measure_collectives",
    "measure_links",
    "native",
    "native_all_reduce",
    "parts",
    "recursive_doubling",
    "reduce_scatter",
    "ring",
    "ring_blocking",
    "run",
    "tree",
]
