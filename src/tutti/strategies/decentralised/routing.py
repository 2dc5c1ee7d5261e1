"""Routes of peers' updates: directly to every rank, or from neighbour to neighbour along a graph."""

import logging

from tutti.strategies.decentralised.graphs import Graph, Topology, topology_for

_log = logging.getLogger("tutti")


class UpdateRoutes:
    """Spanning trees by which updates travel: a shortest-path tree for each origin, so each rank gets an update once.

    All ranks compute the same trees from the same graph and set of living ranks. While they disagree about who is
    alive, an update may be missed or arrive twice; `PeerUpdatesAlgorithm` resends and drops duplicates.
    """

    def __init__(self, graph: str | Graph, size: int) -> None:
        self.is_direct = graph == "all"
        """Whether every rank sends its updates to all others itself."""
        self._graph = None if graph == "all" else _union(topology_for(graph, size))
        self._alive: frozenset[int] = frozenset()
        self._children: dict[int, dict[int, list[int]]] = {}
        """By origin and rank: the ranks that it passes an update on to, among `_alive`."""
        self._has_warned = False

    def children(self, rank: int, origin: int, alive: frozenset[int]) -> list[int]:
        """Return the living ranks to which a rank passes on an update of `origin`."""
        if self._graph is None:
            return sorted(alive - {rank}) if rank == origin else []
        # Trees are kept until a rank is lost.
        if alive != self._alive:
            self._alive, self._children = alive, {}
        if origin not in self._children:
            self._children[origin] = self._tree(origin)
        return self._children[origin].get(rank, [])

    def _tree(self, origin: int) -> dict[int, list[int]]:
        """Return the shortest-path tree from `origin` over the living ranks: the children of each rank."""
        assert self._graph is not None
        # An update of a rank that is lost by now may still be on its way: its tree begins there all the same.
        ranks = sorted(self._alive | {origin})
        graph = self._graph.over(ranks)
        children: dict[int, list[int]] = {}
        reached = {origin}
        # `over` has renumbered the ranks: `ranks` maps back.
        for child, parent in graph.tree(ranks.index(origin)):
            children.setdefault(ranks[parent], []).append(ranks[child])
            reached.add(ranks[child])
        if unreached := self._alive - reached:
            # Ranks that the graph no longer connects get the update from its origin directly.
            children.setdefault(origin, []).extend(sorted(unreached))
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "the graph of the ranks that are left is not connected: rank %s gets updates of rank %d directly",
                    *(", ".join(map(str, sorted(unreached))), origin),
                )
        return children


def _union(topology: Topology) -> Graph:
    """Return a graph of all edges that a topology uses at any clock."""
    if isinstance(topology, Graph):
        return topology
    edges = {(rank, other) for rank in range(topology.size) for other in topology.neighbours(rank)}
    return Graph(topology.size, tuple(edges), directed=True)


def undirected(topology: Topology) -> Graph:
    """Return a graph of all edges that a topology uses at any clock, in both directions."""
    union = _union(topology)
    return Graph(union.size, union.edges)
