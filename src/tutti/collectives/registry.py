"""The registry of collectives: each algorithm with its name and cost formula. An algorithm joins by being listed."""

from tutti.collectives.butterfly import butterfly as _butterfly
from tutti.collectives.butterfly import butterfly_cost
from tutti.collectives.collective import Collective
from tutti.collectives.doubling import recursive_doubling as _recursive_doubling
from tutti.collectives.doubling import recursive_doubling_cost
from tutti.collectives.hierarchical import hierarchical as _hierarchical
from tutti.collectives.hierarchical import hierarchical_cost
from tutti.collectives.native import native as _native
from tutti.collectives.native import native_cost
from tutti.collectives.ring import all_gather as _all_gather
from tutti.collectives.ring import reduce_scatter as _reduce_scatter
from tutti.collectives.ring import ring as _ring
from tutti.collectives.ring import ring_blocking as _ring_blocking
from tutti.collectives.ring import ring_blocking_cost, ring_cost, round_cost
from tutti.collectives.steps import on_flat
from tutti.collectives.tree import broadcast as _broadcast
from tutti.collectives.tree import broadcast_cost, tree_cost
from tutti.collectives.tree import tree as _tree
from tutti.plugins import Registry

ring = Collective("ring", on_flat(_ring), ring_cost)
ring_blocking = Collective("ring_blocking", on_flat(_ring_blocking), ring_blocking_cost)
tree = Collective("tree", on_flat(_tree), tree_cost)
butterfly = Collective("butterfly", on_flat(_butterfly), butterfly_cost)
recursive_doubling = Collective("recursive_doubling", on_flat(_recursive_doubling), recursive_doubling_cost)
hierarchical = Collective("hierarchical", _hierarchical, hierarchical_cost)
native = Collective("native", _native, native_cost)

_BUILT_IN = (ring, ring_blocking, tree, butterfly, recursive_doubling, hierarchical, native)

ALGORITHMS: Registry[Collective] = Registry(
    "all-reduce algorithm",
    "tutti.collectives",
    {collective.name: collective for collective in _BUILT_IN},
    lambda entry: isinstance(entry, Collective),
    "a tutti.collectives.Collective: an all-reduce and its cost",
)
"""All-reduce algorithms: every rank ends with the sum over all ranks. Packages add theirs by entry points of the group
`tutti.collectives`."""

reduce_scatter = Collective("reduce_scatter", on_flat(_reduce_scatter), round_cost)
all_gather = Collective("all_gather", on_flat(_all_gather), round_cost)
broadcast = Collective("broadcast", on_flat(_broadcast), broadcast_cost)
